"""What kernels are chosen for: the code that a GPU runs, and the GPU that it stands for."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from cuda_gpus import gpu_of, pretend
from ttnn_moe.cuda import arch as arches
from ttnn_moe.errors import ContractError


@pytest.mark.parametrize(
    ("capability", "asked_for", "name", "room"),
    [
        ((8, 0), None, "sm_80", 163),
        ((8, 9), None, "sm_89", 99),
        ((8, 9), "sm_80", "compute_80", 99),
        ((9, 0), None, "sm_90a", 227),
        ((9, 0), "sm_90a", "sm_90a", 227),
        ((9, 0), "sm_80", "compute_80", 163),
        ((9, 0), "sm_86", "compute_86", 99),
        ((10, 0), "sm_80", "compute_80", 163),
        ((12, 0), None, "sm_120f", 99),
        ((12, 1), "sm_80", "compute_80", 99),
    ],
)
def test_code_of_a_gpu(capability: tuple[int, int], asked_for: str | None, name: str, room: int) -> None:
    arch = arches.find(gpu_of(capability), asked_for)
    assert arch is not None and (arch.name, arch.shared_memory) == (name, room << 10)
    assert arch.products == ("sm90" if name == "sm_90a" else "sm80")
    assert arch.overlaps == (name in ("sm_90a", "sm_120f"))


def test_gpus_without_kernels() -> None:
    assert arches.find(gpu_of((10, 0))) is None and arches.find(gpu_of((7, 5))) is None


@pytest.mark.parametrize(
    ("capability", "name", "able"),
    [
        ((8, 0), "sm_90a", "['sm_80']"),
        ((8, 6), "sm_87", "['sm_80', 'sm_86']"),
        ((9, 0), "sm_120f", "['sm_80', 'sm_86', 'sm_87', 'sm_89', 'sm_90a']"),
        ((12, 0), "sm_90a", "['sm_80', 'sm_86', 'sm_87', 'sm_89', 'sm_120f']"),
        ((10, 0), "sm_70", "['sm_80', 'sm_86', 'sm_87', 'sm_89']"),
        ((9, 0), "80", "['sm_80', 'sm_86', 'sm_87', 'sm_89', 'sm_90a']"),
    ],
)
def test_code_that_a_gpu_does_not_run_is_refused(capability: tuple[int, int], name: str, able: str) -> None:
    words = re.escape(f"got '{name}'; expected one of {able} on compute capability")
    with pytest.raises(ContractError, match=f"TTNN_MOE_CUDA_ARCH.*{words}.*unset"):
        arches.find(gpu_of(capability), name)


@pytest.mark.parametrize(
    ("capability", "name", "stands_for", "room"),
    [
        ((9, 0), None, (9, 0), 227),
        ((9, 0), "sm_90a", (9, 0), 227),
        ((9, 0), "sm_87", (8, 7), 163),
        ((8, 9), "sm_80", (8, 0), 99),
        ((12, 1), "sm_120f", (12, 1), 99),
        ((10, 0), "sm_86", (8, 6), 99),
    ],
)
def test_the_gpu_that_one_stands_for(
    capability: tuple[int, int],
    name: str | None,
    stands_for: tuple[int, int],
    room: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sizes are those of the older one, in the shared memory that is here."""
    monkeypatch.setenv(arches.ENV, name or "")
    here = gpu_of(capability)
    assert arches.stands_for(here) == replace(here, capability=stands_for, shared_memory=room << 10)


def test_only_hopper_runs_the_kernels_of_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(arches.build, "why_not", lambda: None)
    pretend(monkeypatch, gpu_of((9, 0)))
    assert arches.has_warpgroups(cuda) and arches.why_not_hopper(cuda) is None
    assert "no GPU of compute capability 9.0" in str(arches.why_not_hopper(torch.device("cpu")))
    monkeypatch.setenv(arches.ENV, "sm_80")
    assert not arches.has_warpgroups(cuda) and "asks for sm_80" in str(arches.why_not_hopper(cuda))
    monkeypatch.delenv(arches.ENV)
    pretend(monkeypatch, gpu_of((12, 0)))
    assert not arches.has_warpgroups(cuda) and arches.why_not_hopper(cuda) is not None


def test_tensors_that_are_copied_in_words_of_16_bytes() -> None:
    whole = torch.zeros(4, 32, dtype=torch.bfloat16)
    assert arches.why_not_words(torch.bfloat16, whole, whole[1:]) is None
    for other in (whole.half(), whole.T, whole.flatten()[1:33]):
        assert arches.why_not_words(torch.bfloat16, whole, other) is not None
