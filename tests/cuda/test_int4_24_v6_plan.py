"""The plans of v6 of int4_24: sizes, refusals, the machine code that nvcc makes."""

from __future__ import annotations

import itertools
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from int4_24_cases import exact_experts
from machine_code import NVCC, NVDISASM, listing
from ttnn_moe import Problem, Routing
from ttnn_moe.cuda.arch import ARCHES, HOPPER, Target
from ttnn_moe.cuda.device import H200
from ttnn_moe.cuda.moe.families import Chosen, choose
from ttnn_moe.cuda.moe.int4_24_v6 import FOLDER, INT4_24_V6
from ttnn_moe.cuda.moe.prepared import bytes_of, most_bytes
from ttnn_moe.cuda.moe.steps import step_tiles
from ttnn_moe.errors import BackendUnavailable
from ttnn_moe.sources import kernel_path


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
@pytest.mark.parametrize(("kernel", "paths"), [("k2_w13", 2), ("k4_w2", 1)])
def test_the_machine_code_has_the_pinned_instructions(kernel: str, paths: int, tmp_path: Path) -> None:
    """Of sm_80. Each unrolled step has two ldmatrix, and for each path a product with each selector.

    One ldmatrix comes before the steps.
    """
    source, steps = kernel_path("gpu_kernels", "cuda", "sm80", "int4_24_v6", f"{kernel}.cu"), 4
    flags = [f"-I{kernel_path('gpu_kernels', 'cuda')}", f"-DWORDS_AHEAD={steps}", "-std=c++17", "-arch=sm_80"]
    command = [str(NVCC), *flags, "-cubin", "-keep", "-keep-dir", str(tmp_path), str(source)]
    subprocess.run([*command, "-o", str(tmp_path / "cubin")], check=True, timeout=300)
    ptx = (tmp_path / f"{kernel}.ptx").read_text()
    assert len(re.findall(r"ldmatrix\.sync\.aligned\.m8n8\.x4\.trans\.shared\.b16", ptx)) == 2 * steps + 1
    product = r"mma\.sp::ordered_metadata\.sync\.aligned\.m16n8k32\.row\.col\.f32\.bf16\.bf16\.f32.*, (\d);"
    assert sorted(re.findall(product, ptx)) == ["0"] * paths * steps + ["1"] * paths * steps
    # after each preload, and before the next one
    assert len(re.findall(r"bar\.sync|barrier\.sync", ptx)) == 2
    if NVDISASM is None:
        return
    code = listing(tmp_path / "cubin")
    assert len(re.findall(r"HMMA\.SP\.16832\.F32\.BF16", code)) == 2 * paths * steps
    assert len(re.findall(r"LDSM\.16\.MT88\.4", code)) == 2 * steps + 1
    assert not re.search(r"\b(LDL|STL)\b", code), "it spills"


def test_sizes_of_the_contract() -> None:
    """Xsh and grids of DeepSeek-V3 and Qwen3-30B-A3B on sm_80: K2 has one block a multiprocessor at H = 7168."""
    target = Target(H200, ARCHES[8, 0])
    for E, H, I in ((128, 7168, 2048), (256, 7168, 2048), (128, 2048, 768)):
        for T in (1, 8, 4096):
            problem = Problem(T, E, 8, H, I, weight_format="int4_24")
            assert INT4_24_V6.why_not(problem, target) is None
            plan = INT4_24_V6.plan(problem, target)
            uses = {use.spec.name: use for use in INT4_24_V6.uses(plan, False, False)}
            k2, k4 = (uses[f"{FOLDER}/{name}"].shared_memory for name in ("k2_w13", "k4_w2"))
            assert (k2, k4) == (H * 16, I * 16) and k2 <= target.arch.shared_memory
            if H == 7168:
                assert k2 == 112 << 10 and k4 == 32 << 10 and 2 * k2 > 164 << 10


def test_a_fast_family_runs_whatever_v6_runs() -> None:
    """So `moe` never chooses v6: docs/int4_24.md tells users to call FusedMoE."""
    tokens, sizes = (1, 3, 4, 24, 64, 4096, 1 << 20), (64, 128, 768, 2048, 7168, 14528)
    run = 0
    for arch, E, T in itertools.product(dict.fromkeys(ARCHES.values()), (1, 8, 128, 1024), tokens):
        for H, I, K in itertools.product(sizes, sizes, (1, 8, 16)):
            problem, target = Problem(T, E, K, H, I, weight_format="int4_24"), Target(H200, arch)
            if INT4_24_V6.why_not(problem, target) is None:
                chosen, run = choose(problem, target), run + 1
                assert isinstance(chosen, Chosen) and chosen.family is not INT4_24_V6, problem
    assert run > 5000


def test_a_prepared_layer_has_room_for_every_smaller_call() -> None:
    for capability in ((8, 0), (9, 0), (12, 0)):
        target, rooms = Target(H200, ARCHES[capability]), []
        for T in (1, 2, 7, 8, 9, 33, 64, 65, 255, 256, 1000, 4096):
            problem = Problem(T, 256, 8, 2048, 768, weight_format="int4_24")
            rooms.append(most_bytes(problem, target))
            assert bytes_of(INT4_24_V6.scratch(INT4_24_V6.plan(problem, target))) <= rooms[-1]
        assert rooms == sorted(rooms)


def test_the_families_of_the_format_are_asked_alone() -> None:
    problem = Problem(4, 8, 2, 128, 64, weight_format="int4_24")
    assert not isinstance(choose(problem, Target(H200, HOPPER)), str)
    assert choose(problem, Target(H200, None, "no compiler")) == "no compiler"
    dense = choose(Problem(4, 8, 2, 128, 64), Target(H200, HOPPER))
    assert "int4_24" not in str(dense)
    assert "int4_24 and dense weights, not 'other'" in str(
        choose(replace(problem, weight_format="other"), Target(H200, HOPPER))
    )


def test_the_steps_are_refused() -> None:
    routing = Routing.from_topk(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1), 2)
    with pytest.raises(BackendUnavailable, match="steps run dense weights on CUDA; got 'int4_24'"):
        step_tiles(routing, exact_experts(2, 64, 64))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight_format": "dense"}, "int4_24 weights, not 'dense'"),
        ({"dtype": torch.float16}, "multiplies bf16, not float16"),
        ({"H": 96}, "multiples of 64, not 96"),
        ({"H": 16384}, "H=16384 in shared memory, 262144 bytes, and sm_90a gives it 232448"),
        ({"I": 16384}, "I=16384 in shared memory, 262144 bytes"),
        ({"K": 17}, "K up to 16"),
    ],
)
def test_why_not(change: dict[str, Any], words: str) -> None:
    sizes: dict[str, Any] = {"T": 4, "E": 8, "K": 2, "H": 128, "I": 64, "weight_format": "int4_24"} | change
    reason = INT4_24_V6.why_not(Problem(**sizes), Target(H200, HOPPER))
    assert reason is not None and words in reason


def test_a_gpu_whose_blocks_do_not_hold_the_monolith_is_refused() -> None:
    reason = INT4_24_V6.why_not(Problem(1, 256, 8, 7168, 2048, weight_format="int4_24"), Target(H200, ARCHES[8, 6]))
    assert reason is not None and "114688 bytes, and sm_86 gives it 101376" in reason
