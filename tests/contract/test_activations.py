"""Backends and kernels that compute silu(gate) * up refuse other experts, with the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cuda_gpus import gpu_of
from ttnn_moe import Problem
from ttnn_moe.ascend.backend import AscendBackend
from ttnn_moe.cuda.arch import ARCHES, Target
from ttnn_moe.cuda.moe.families import FAMILIES
from ttnn_moe.tenstorrent.backend import TenstorrentBackend

PROBLEM = Problem(1, 16, 4, 128, 128)
BEYOND = [({"activation": "clamped_swiglu"}, "silu(gate) * up, not 'clamped_swiglu'"), ({"biased": True}, "no biases")]


@pytest.mark.parametrize(("change", "words"), BEYOND)
@pytest.mark.parametrize("backend, device", [(TenstorrentBackend(), "cpu"), (AscendBackend(), "npu")])
def test_backends(backend, device: str, change: dict, words: str) -> None:
    problem = replace(PROBLEM, device=device)
    assert backend.why_not(problem) is None
    assert words in (backend.why_not(replace(problem, **change)) or "")


@pytest.mark.parametrize(("change", "words"), BEYOND)
@pytest.mark.parametrize(
    "family", [family for family in FAMILIES if not family.weight_format.startswith("mxfp4")], ids=lambda f: f.name
)
def test_families(family, change: dict, words: str) -> None:
    problems = [replace(PROBLEM, T=T, device="cuda", weight_format=family.weight_format) for T in (1, 64, 4096)]
    targets = [Target(gpu_of(capability), arch) for capability, arch in ARCHES.items()]
    able = [(p, target) for p in problems for target in targets if family.why_not(p, target) is None]
    assert able
    for problem, target in able:
        assert words in (family.why_not(replace(problem, **change), target) or "")
