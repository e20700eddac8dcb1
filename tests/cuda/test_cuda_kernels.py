"""The CUDA backend's kernels without a GPU: run by Triton's interpreter, and compiled for GPUs that are not here."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from cuda_gpus import gpu_of
from processes import run_interpreted
from triton_offline import BF16, F32, I32, I64, compile_kernel
from ttnn_moe import Problem
from ttnn_moe.cuda.moe.triton_tiles import FewTiles, SortedTiles, few_tiles, sorted_tiles

Tiles = FewTiles | SortedTiles


# The operator in bf16, and in fp16 where rounding shows ("float16" names bfloat16, too).
FUSED = "test_fused and (bfloat16 or (float16 and (odd_sizes or nan_and_inf or absent_ids)))"
# Steps, sums in fp32 and prepared layers, on the cases that reach other code, each in one dtype.
HALVES = "not bfloat16 and float16 and (nan_and_inf or absent_ids or one_token)"
OTHERS = f"not test_fused and ((float32 and (odd_sizes or token_bound)) or ({HALVES}) or order_of_its_own)"


@pytest.mark.slow(60)
def test_the_operator_and_the_sort_in_the_interpreter() -> None:
    chosen = f"test_sort or ({FUSED}) or ({OTHERS})"
    files = ("tests/contract/test_cases.py", "tests/support/cuda_sort_cases.py")
    run_interpreted(*files, "--backend", "cuda", "-k", chosen)


SORT = {"HAS_MAP": True, "HAS_BOUND": True, "E_PAD": 128}
ROUTED = {"offsets": I32, "row_tokens": I32, "tiles": I32, "num_tiles": I32}


def _qwen3(tiles: Tiles, capability: int) -> list[Any]:
    """Every launch of one call with Qwen3-30B-A3B's sizes."""
    compiled = []

    def kernel(name: str, arguments: dict[str, str], constants: dict[str, Any], **options: int) -> None:
        compiled.append(compile_kernel(name, arguments, constants, capability, **options))

    sizes = {"H": "i32x16", "I": "i32x16"}
    rows = {"rows_of_expert": "i32x16", "row_stride": "i32x16"}
    ids = {"ids": I32, "expert_map": I32, "num_tokens": I32}
    if isinstance(tiles, FewTiles):
        both = {"HAS_MAP": True, "HAS_BOUND": True}
        up, down = tiles.gate_up, tiles.down
        kernel(
            "few_gate_up",
            {"hidden": BF16, "gate": BF16, "up": BF16, **ids, "act": BF16, "E_ids": "i32", "K": "i32", **sizes, **rows},
            {**both, "BLOCK_N": up.n, "BLOCK_K": up.k},
            num_warps=up.warps,
            num_stages=up.stages,
        )
        kernel(
            "few_down",
            {"act": BF16, "down": BF16, **ids, "weights": F32, "out": BF16, "E_ids": "i32", **sizes},
            {**both, "K": 8, "ADD": False, "BLOCK_N": down.n, "BLOCK_K": down.k, "STAGES": down.stages},
            num_warps=down.warps,
        )
        return compiled
    kernel(
        "routing_sort:routing_count",
        {**ids, "counts": I32, "P": "i32", "E_ids": "i32", "K": "i32"},
        {**SORT, "CHUNK": tiles.sort_chunk},
        num_warps=8,
    )
    kernel(
        "routing_sort:routing_sort",
        {
            **ids,
            "ids": I64,
            "counts": I32,
            "offsets": I32,
            "row_tokens": I32,
            "inverse": I32,
            "tiles": I32,
            "num_tiles": I32,
            "P": "i32",
            "E_ids": "i32",
            "E": "i32",
            "K": "i32",
            "chunks": "i32",
        },
        {**SORT, "COUNTED": True, "BLOCK_M": tiles.m, "CHUNK": tiles.sort_chunk},
        num_warps=8,
    )
    blocks = {"BLOCK_M": tiles.m, "EVEN_K": True, "PRECISION": "tf32"}
    tile = tiles.gate_up
    kernel(
        "gate_up",
        {"hidden": BF16, "gate": BF16, "up": BF16, **ROUTED, "act": BF16, **sizes, **rows},
        {**blocks, "BLOCK_N": tile.n, "BLOCK_K": tile.k},
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    for gather, tile in ((True, tiles.gate_up), (False, tiles.down)):
        kernel(
            "grouped_matmul",
            {"x": BF16, "weights": BF16, **ROUTED, "out": BF16, "M": "i32x16", "N": "i32x16", **rows},
            {**blocks, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "GATHER": gather},
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    kernel(
        "combine",
        {"rows": BF16, "inverse": I32, "weights": F32, "num_tokens": I32, "out": BF16, "H": "i32x16"},
        {"K": 8, "HAS_BOUND": True, "ADD": True, "BLOCK_H": tiles.combine_h},
        num_warps=1,
    )
    return compiled


def _all_tiles(capability: int) -> list[Tiles]:
    """What Qwen3-30B-A3B's sizes get, whatever T."""
    problems = [Problem(1 << i, 128, 8, 2048, 768) for i in range(16)]
    gpu = gpu_of(divmod(capability, 10))
    return [few_tiles(problems[0]), *sorted({sorted_tiles(problem, gpu) for problem in problems[2:]}, key=str)]


@pytest.mark.parametrize(
    ("capability", "tiles"),
    [(capability, tiles) for capability in (80, 90, 120) for tiles in _all_tiles(capability)],
    ids=lambda value: (
        f"m{value.m}" if isinstance(value, SortedTiles) else "few" if isinstance(value, FewTiles) else None
    ),
)
def test_kernels_compile_for_gpus_that_are_not_here(capability: int, tiles: Tiles) -> None:
    compiled = _qwen3(tiles, capability)
    products = sum("mma" in kernel.asm["ptx"] for kernel in compiled)
    assert products == (0 if isinstance(tiles, FewTiles) else 3)
    if capability == 90 and isinstance(tiles, SortedTiles) and tiles.m >= 64:
        assert sum("wgmma" in kernel.asm["ptx"] for kernel in compiled) == 3
