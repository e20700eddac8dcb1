"""Which kernels run a decoder layer, as `decoder.why` says: on a GPU that stands in, and without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from ttnn_moe import choice, decoder
from ttnn_moe.choice import TORCH, Family, Operator
from ttnn_moe.cuda import device
from ttnn_moe.cuda.arch import has_warpgroups
from ttnn_moe.cuda.device import Gpu
from ttnn_moe.cuda.jit import build
from ttnn_moe.cuda.triton_launch import pdl

pytest.importorskip("triton")

QWEN3 = {"H": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128, "E": 128, "K": 8, "dtype": torch.bfloat16}
CUDA = torch.device("cuda", 0)


def rows(monkeypatch: pytest.MonkeyPatch, T: int, capability: tuple[int, int] = (9, 0), **sizes) -> dict[str, str]:
    """What runs each operator; every refusal has a reason."""
    monkeypatch.setattr(device, "query", lambda _: Gpu(capability, 132, 227 << 10))
    monkeypatch.setattr(build, "why_not", lambda: None)
    found = decoder.why(T=T, device=CUDA, **{**QWEN3, **sizes})
    assert all(family and reason for row in found for family, reason in row.refused)
    return {row.operator.partition(" ")[0]: row.runs for row in found}


def test_few_rows_decode_and_prompts_take_different_families(monkeypatch: pytest.MonkeyPatch) -> None:
    one, some, many = (rows(monkeypatch, T) for T in (1, 8, 4000))
    assert [of["norm_linear"] for of in (one, some, many)] == [
        "Triton few_linear",
        "CUDA C++ decode_linear (sm_90a)",
        "rms_norm, GEMM",
    ]
    assert [of["norm_route"] for of in (one, some, many)] == [
        "CUDA C++ norm_route (sm_90a)",
        "CUDA C++ norm_route (sm_90a)",
        "rms_norm, GEMM, route",
    ]
    assert one["prefill_attention"] == "CUDA C++ prefill_attention (sm_90a)"
    assert {of["decode_attention"] for of in (one, some, many)} == {"CUDA C++ decode_attention (sm_90a)"}
    assert one["bucketed_norm_rope_write"] == "CUDA C++ bucketed_write"
    assert one["bucketed_attention"] == "CUDA C++ bucketed_attention (mma.sync)"
    assert one["linear_add"] == some["linear_add"] == "CUDA C++ decode_linear (sm_90a)"
    assert many["linear_add"] == "GEMM in place"


def test_other_gpus_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    older = rows(monkeypatch, 16, (8, 0))
    assert rows(monkeypatch, 2, (8, 0))["linear_add"] == "Triton few_linear" and older["linear_add"] == "GEMM in place"
    assert rows(monkeypatch, 161)["linear_add"] == "GEMM in place"
    assert rows(monkeypatch, 160)["norm_route"] == "CUDA C++ norm_route (sm_90a)"
    assert rows(monkeypatch, 97, H=4096)["norm_route"] == "Triton router_logits, router_topk"
    assert older["norm_route"] == "Triton router_logits, router_topk"
    assert rows(monkeypatch, 1, E=64)["norm_route"] == "Triton few_linear, router_topk"
    assert older["prefill_attention"] == "Triton prefill_attention" and older["norm_linear"] == "rms_norm, GEMM"
    assert older["decode_attention"] == "Triton decode_attention"
    assert rows(monkeypatch, 16, head_dim=32)["decode_attention"] == "Triton decode_attention"
    assert set(rows(monkeypatch, 16, (7, 5)).values()) == {TORCH}
    odd = rows(monkeypatch, 16, head_dim=24)
    assert {name for name, runs in odd.items() if runs == TORCH} == {
        "norm_rope_write",
        "decode_attention",
        "prefill_attention",
        "bucketed_norm_rope_write",
        "bucketed_attention",
    }
    assert rows(monkeypatch, 16, head_dim=96)["bucketed_attention"] == "Triton bucketed_attention"


@pytest.mark.parametrize("T", [1, 16, 4000])
def test_a_gpu_that_stands_for_an_older_one_takes_its_families(monkeypatch: pytest.MonkeyPatch, T: int) -> None:
    older = rows(monkeypatch, T, (8, 0))
    assert older["prefill_attention"] == "Triton prefill_attention"
    monkeypatch.setenv("TTNN_MOE_CUDA_ARCH", "sm_80")
    assert rows(monkeypatch, T) == older
    assert not has_warpgroups(CUDA) and pdl(CUDA) == {"PDL": False}


def test_without_a_gpu_or_with_plain_everything_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = decoder.why(T=4, device=torch.device("cpu"), **QWEN3)
    assert {row.runs for row in found} == {TORCH}
    assert {reason for row in found for _, reason in row.refused} == {"the tensor is not on a CUDA device"}
    with decoder.plain():
        assert set(rows(monkeypatch, 4).values()) == {TORCH}


def test_kernels_launch_on_the_gpu_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current GPU, wherever the tensors are."""
    entered: list[str] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        entered.append(str(device))
        yield
        entered.append("left")

    monkeypatch.setattr(choice, "on", on)
    monkeypatch.setattr(choice, "why_not_kernels", lambda *_: None)
    family = Family("seen", lambda *_: None, lambda x: [*entered])
    assert Operator("op", [family], list)(torch.zeros(1)) == ["cpu"] and entered == ["cpu", "left"]
