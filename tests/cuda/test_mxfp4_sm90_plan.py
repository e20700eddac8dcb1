"""The plans of Hopper's MXFP4 products: tiles that the kernel compiles, scratch, refusals."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
import torch

from cuda_gpus import gpu_of
from ttnn_moe import Problem
from ttnn_moe.cuda.arch import ARCHES, HOPPER, Target
from ttnn_moe.cuda.jit import build
from ttnn_moe.cuda.moe.families import choose
from ttnn_moe.cuda.moe.prepared import bytes_of
from ttnn_moe.cuda.moe.sm90_mxfp4 import MXFP4_BOXES_SM90, MXFP4_SM90, Mxfp4Tile, Sm90Mxfp4
from ttnn_moe.formats.mxfp4 import NAME
from ttnn_moe.sources import kernel_path


@pytest.mark.parametrize("family", [MXFP4_SM90, MXFP4_BOXES_SM90], ids=lambda family: family.name)
@pytest.mark.parametrize(("H", "I"), [(2880, 2880), (2048, 768), (7168, 2048), (32, 32), (96, 4096)])
def test_every_plan_fits(H: int, I: int, family: Sm90Mxfp4) -> None:
    target = Target(gpu_of((9, 0)), HOPPER)
    for T in (1, 8, 128, 256, 512, 4096, 1 << 17):
        problem = Problem(T, 128, 4, H, I, weight_format=family.weight_format)
        assert family.why_not(problem, target) is None
        tile = family.plan(problem, target).tile
        assert tile.boxed == (family is MXFP4_BOXES_SM90)
        assert tile.shared_memory <= HOPPER.shared_memory and tile.max_n % tile.granule == 0
        # a block takes 1 KiB more; of wider layers the scales leave room for fewer resident blocks
        assert max(H, I) > 4096 or tile.blocks * (tile.shared_memory + 1024) <= HOPPER.shared_memory + 1024
        assert tile.boxed or tile.scale_bytes >= tile.weight_rows * max(H, I) // 32
        assert tile.weight_stages >= 2 and tile.row_stages >= 2
        assert tile.boxed or not (tile.read_once and H % 64)


@pytest.mark.parametrize("capability", sorted(ARCHES), ids=str)
def test_arranged_weights_run_with_any_tokens_or_with_none(capability: tuple[int, int]) -> None:
    """Loaders arrange experts where one token runs."""
    target = Target(gpu_of(capability), ARCHES[capability])
    for T in (1, 2, 5, 40, 4096):
        problem = Problem(T, 128, 4, 2880, 2880, weight_format=MXFP4_BOXES_SM90.weight_format, device="cuda")
        chosen = choose(problem, target)
        assert isinstance(chosen, str) == (ARCHES[capability] is not HOPPER), (T, chosen)


def _breaks_a_rule(tile: Mxfp4Tile) -> bool:
    """What the kernel asserts or takes for granted: sm90/mxfp4_block.cuh."""
    one_ring = tile.warp_products or tile.by_columns
    rules = (
        tile.max_n % (8 if one_ring else 16) == 0 and 0 < tile.max_n <= 192,
        tile.weight_rows in ((128, 256, 512) if tile.by_columns else (128, 256)),
        tile.weight_rows % (64 * tile.groups) == 0,
        tile.row_units in (1, 2) and (not one_ring or tile.row_units == 2),
        tile.weight_stages == tile.row_stages if one_ring else min(tile.weight_stages, tile.row_stages) >= 2,
        tile.direct or not tile.warp_products,
        tile.boxed or not tile.by_columns,
        tile.shared_memory <= HOPPER.shared_memory,
    )
    return not all(rules)


@pytest.mark.parametrize("family", [MXFP4_SM90, MXFP4_BOXES_SM90], ids=lambda family: family.name)
def test_every_tile_keeps_the_rules_of_the_kernel(family: Sm90Mxfp4) -> None:
    """Of H and I as wide as shared memory allows for the scales, and 4 to 4096 tokens of few and many experts."""
    target, wrong = Target(gpu_of((9, 0)), HOPPER), []
    widths = range(32, 1 << 15, 160)
    sizes = [(2048, wide) for wide in widths] + [(wide, 1024) for wide in widths] + [(7168, 2048), (6144, 16384)]
    for E, K in ((8, 2), (256, 8)):
        for H, I in sizes:
            for T in (4, 16, 32, 64, 128, 256, 641, 1536, 4096):
                problem = Problem(T, E, K, H, I, weight_format=family.weight_format)
                if family.why_not(problem, target) is None:
                    tile = family.tile(problem, HOPPER)
                    wrong += [(problem, tile)] if _breaks_a_rule(tile) else []
    assert not wrong, f"{len(wrong)} tiles, the first {wrong[0]}"


@pytest.mark.slow(20)
@pytest.mark.skipif(build.why_not() is not None, reason="NVRTC is not here")
@pytest.mark.parametrize(
    ("E", "K", "H", "I", "T", "max_n"),
    [
        (256, 8, 7168, 2048, 641, 48),
        (8, 2, 6144, 16384, 64, 32),
        (8, 2, 6144, 16384, 128, 48),
        (8, 2, 6144, 16384, 256, 64),
        (8, 2, 2048, 20704, 256, 32),
        (8, 2, 2048, 20704, 128, 16),
    ],
)
def test_narrowed_tiles_compile(E: int, K: int, H: int, I: int, T: int, max_n: int) -> None:
    """Tiles with fewer rows than the table has, beside the scales of wide layers: nothing spills."""
    plan = MXFP4_SM90.plan(Problem(T, E, K, H, I, weight_format=NAME), Target(gpu_of((9, 0)), HOPPER))
    assert plan.tile.max_n == max_n and plan.tile.weight_rows == 128
    (product,) = (use for use in MXFP4_SM90.uses(plan, False, False) if use.spec.name == "sm90/mxfp4_mlp")
    core, report = build.cuda_core(), io.StringIO()
    options = core.ProgramOptions(**build.options(product.spec), ptxas_options="-v")
    source = kernel_path("gpu_kernels", "cuda", "sm90", "mxfp4_mlp.cu").read_text()
    assert core.Program(source, "c++", options).compile("cubin", logs=report).code[:4] == b"\x7fELF"
    assert "0 bytes spill stores, 0 bytes spill loads" in report.getvalue()
    assert "wgmma" not in report.getvalue(), "the compiler puts products one after the other"


@pytest.mark.parametrize("family", [MXFP4_SM90, MXFP4_BOXES_SM90], ids=lambda family: family.name)
def test_scratch_grows_with_the_tokens(family: Sm90Mxfp4) -> None:
    """Tiles of 8 rows, of few tokens, need more words of the sort than larger tiles of a few tokens more."""
    target, problem = Target(gpu_of((9, 0)), HOPPER), Problem(1, 1024, 1, 32, 32, weight_format=family.weight_format)
    plans = (family.plan(replace(problem, T=T), target) for T in range(5000, 5300))
    sizes = [bytes_of(family.scratch(plan)) for plan in plans]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("family", [MXFP4_SM90, MXFP4_BOXES_SM90], ids=lambda family: family.name)
def test_combine_drops_whole_lines_alone(family: Sm90Mxfp4) -> None:
    """A line of 128 bytes may hold the end of a row that is still to be read."""
    target, drops = Target(gpu_of((9, 0)), HOPPER), []
    for H in (32, 96, 160, 256):
        plan = family.plan(Problem(64, 128, 4, H, 256, weight_format=family.weight_format), target)
        drops.append(dict(family.uses(plan, False, False)[-1].spec.defines)["DISCARD"])
    assert drops == ["0", "0", "0", "1"]


def test_why_not() -> None:
    def why_not(capability: tuple[int, int] = (9, 0), **change: Any) -> str | None:
        sizes = {"T": 64, "E": 128, "K": 4, "H": 2880, "I": 2880}
        problem = Problem(**{**sizes, "weight_format": NAME, **change})
        return MXFP4_SM90.why_not(problem, Target(gpu_of(capability), ARCHES[capability]))

    assert why_not() is None
    for reason, words in [
        (why_not((8, 0)), "sm_90a, not sm_80"),
        (why_not(H=2864), "multiples of 32"),
        (why_not(H=1 << 15), "shared memory for scales"),
        (why_not(dtype=torch.float16), "bf16"),
    ]:
        assert reason is not None and words in reason
