"""The fast kernels of int4_24 without a GPU: on the host, through the launches of a call, and their plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import packed_calls
from host_kernels import GXX, HostKernels, with_mistake
from int4_24_cases import random_int4_24, random_words
from packed_calls import EXPERTS, PAIRS, problem_of
from ttnn_moe import Experts, Problem
from ttnn_moe.cuda.arch import ARCHES, HOPPER, Target
from ttnn_moe.cuda.device import H200
from ttnn_moe.cuda.moe import sm80_int4_24_fp16
from ttnn_moe.cuda.moe.families import choose
from ttnn_moe.cuda.moe.int4_24_few import INT4_24_FEW, ColumnPlan, ColumnSizes
from ttnn_moe.cuda.moe.prepared import bytes_of, most_bytes
from ttnn_moe.cuda.moe.sm80_int4_24 import INT4_24, SparseTile
from ttnn_moe.cuda.moe.sm80_int4_24_fp16 import INT4_24_FP16, SparseManyTile
from ttnn_moe.cuda.moe.sm90_int4_24 import INT4_24_SM90, Sm90SparseTile
from ttnn_moe.cuda.moe.sm90_int4_24_few import INT4_24_FEW_SM90, DirectSizes, even_eights
from ttnn_moe.cuda.moe.sm90_int4_24_fp16 import INT4_24_FP16_SM90, Fp16Tile
from ttnn_moe.cuda.moe.sort import Sorters
from ttnn_moe.cuda.moe.sorted import SortedPlan
from ttnn_moe.formats.int4_24 import NAME

on_host = pytest.mark.skipif(GXX is None, reason="g++ is not installed")
BF16 = torch.bfloat16
FAMILIES = (INT4_24, INT4_24_FP16, INT4_24_SM90, INT4_24_FP16_SM90, INT4_24_FEW, INT4_24_FEW_SM90)
Sizes = ColumnSizes | DirectSizes | SparseTile | SparseManyTile | Sm90SparseTile | Fp16Tile
OF_TILES = {
    SparseTile: INT4_24,
    SparseManyTile: INT4_24_FP16,
    Sm90SparseTile: INT4_24_SM90,
    Fp16Tile: INT4_24_FP16_SM90,
}


def worst(
    kernels: HostKernels,
    monkeypatch: pytest.MonkeyPatch,
    sizes: Sizes,
    T: int,
    H: int,
    I: int,
    order: str = "halves",
    add: bool = False,
    bound: int | None = None,
    spread: int = 0,
) -> float:
    """Run a call of four experts, three a token; 0 if it is within the bound of the oracle, else infinity.

    spread: rows of hidden differ by up to 2^spread, one is zero, and scales by up to 2^27.
    """
    torch.manual_seed(T)
    experts = random_int4_24(EXPERTS, H, I, order)
    hidden, weights = torch.randn(T, H).bfloat16(), torch.rand(T, PAIRS)
    if spread:
        hidden *= 2.0 ** torch.randint(-spread, spread + 1, (T, 1))
        hidden[1] = 0
        w13, w2 = (
            random_words(EXPERTS, R, channels, (2.0 ** (torch.rand(EXPERTS, R, channels // 32) * 27 - 24)).bfloat16())
            for R, channels in ((2 * I, H), (H, I))
        )
        experts = Experts.int4_24(w13, w2, gate_up_order=order)
        assert experts.fp16_scales
    problem = problem_of(experts, T)
    few = isinstance(sizes, ColumnSizes | DirectSizes)
    family: Any
    plan: Any
    if isinstance(sizes, ColumnSizes):
        family, plan = INT4_24_FEW, ColumnPlan(problem, HOPPER, sizes)
    elif isinstance(sizes, DirectSizes):
        family, plan = INT4_24_FEW_SM90, ColumnPlan(problem, HOPPER, sizes)
    else:
        family = OF_TILES[type(sizes)]
        plan = SortedPlan(problem, HOPPER, sizes, Sorters(128))
    return packed_calls.worst(
        kernels, monkeypatch, family, plan, hidden, weights, experts, few=few, add=add, bound=bound
    )


WIDE = SparseTile(1, 1, 2, 8, 2, 2)
QUADS_90 = Sm90SparseTile(8, 2, 4, 2, warps=4)
MANY = SparseManyTile(2, 32, 2, 3)
FP16_90 = Fp16Tile(16, 2, 2, 2, warps=12)
FORMS: list[tuple[Sizes, int, int, int, str]] = [
    (ColumnSizes(up_depth=2), 2, 320, 64, "halves"),
    (ColumnSizes(2, 4, 4, 3, 2), 1, 192, 192, "interleaved"),
    (WIDE, 3, 64, 64, "halves"),
    (WIDE, 17, 576, 320, "interleaved"),
    (SparseTile(2, 1, 2, 32, 2, 3), 30, 320, 64, "halves"),
    (SparseTile(1, 2, 1, 128, 1, 3, read_once=True), 80, 128, 192, "interleaved"),
    (MANY, 30, 192, 320, "halves"),
    (SparseManyTile(2, 48, 1, 3), 41, 64, 192, "interleaved"),
    (SparseManyTile(4, 64, 2, 2), 41, 320, 128, "halves"),
    (SparseManyTile(8, 16, 4, 3, blocks=2), 11, 320, 192, "interleaved"),
    (SparseManyTile(8, 32, 2, 2, blocks=2), 30, 192, 320, "interleaved"),
    (SparseManyTile(12, 80, 2, 3), 80, 448, 192, "halves"),
    (SparseManyTile(8, 144, 2, 3), 80, 320, 128, "interleaved"),
]


@on_host
@pytest.mark.slow(40)
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize(("sizes", "T", "H", "I", "order"), FORMS, ids=str)
def test_a_call_is_within_the_bound(
    sizes: Sizes, T: int, H: int, I: int, order: str, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged tiles, an expert without tokens, ids of no expert, odd numbers of slabs, in scratch full of NaN."""
    kernels = HostKernels(tmp_path, late, together=3)
    assert worst(kernels, monkeypatch, sizes, T, H, I, order) == 0
    assert worst(kernels, monkeypatch, sizes, T, H, I, order, add=True, bound=(T + 1) // 2) == 0


@on_host
@pytest.mark.slow(25)
@pytest.mark.parametrize(
    ("sizes", "T", "H", "I", "order"),
    [
        (DirectSizes(up_ahead=1), 2, 320, 64, "halves"),
        (DirectSizes(1, 2, 4, 2, 1, 4, 2, 2, 1), 1, 192, 192, "interleaved"),
        (DirectSizes(down_eights=3, down_warps=2, down_ahead=1), 1, 192, 320, "halves"),
        (QUADS_90, 17, 192, 448, "interleaved"),
        (replace(QUADS_90, max_n=4, m_tiles=1), 5, 320, 64, "halves"),
        (FP16_90, 17, 192, 64, "interleaved"),
        (Fp16Tile(8, 2, 4, 2), 17, 192, 448, "interleaved"),
        (Fp16Tile(24, 1, 2, 2, warps=16), 41, 320, 192, "halves"),
        (Fp16Tile(96, 2, 2, 2), 80, 128, 192, "halves"),
    ],
    ids=str,
)
def test_a_call_of_hopper_is_within_the_bound(
    sizes: Sizes, T: int, H: int, I: int, order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts with 1, 2, 4 and more rows, ragged tiles, blocks of weight rows that are cut, odd numbers of slabs."""
    kernels = HostKernels(tmp_path, True, together=3)
    assert worst(kernels, monkeypatch, sizes, T, H, I, order) == 0
    assert worst(kernels, monkeypatch, sizes, T, H, I, order, add=True, bound=(T + 1) // 2) == 0


@on_host
@pytest.mark.parametrize("sizes", [FP16_90, MANY], ids=str)
def test_fp16_holds_rows_and_scales_of_any_size(sizes: Sizes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows from 2^-60 to 2^60 times others, a row of zeros, scales from 2^-24 to 2^3."""
    assert worst(HostKernels(tmp_path, True, together=3), monkeypatch, sizes, 17, 192, 192, spread=30) == 0


@on_host
@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("copies_wait<STAGES - 2>();", "copies_wait<STAGES - 1>();"),
        ("if (s < slabs", "if (true"),
        ("while (!complete(item.tile)) {", "while (false) {"),
        ("place_of_row(lane / 4,", "place_of_row(lane / 8,"),
        ("| second;", "| 0x44444444u;"),
    ],
)
def test_a_mistake_is_seen(line: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = HostKernels(tmp_path, True, with_mistake(tmp_path, "sm80/int4_24_mlp", line, instead), together=3)
    assert worst(kernels, monkeypatch, WIDE, 9, 192, 64) > 0


@on_host
@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("s < slabs", "true"),
        ("if (!*last) return;", ""),
        ("powers[first + row] = power.down", "powers[first] = power.down"),
        ("powers + n % (STAGES + 1) * MAX_N", "powers"),
        ("!early) loader.fill(free);", "!early && free) loader.fill(here);"),
        ("0xd480e408u", "0xd480d480u"),
        ("            loader.made(done);", "            work.made(done);"),
    ],
    ids=["half a stage", "not the last", "powers", "powers of another item", "late", "the value of Y", "bf16 as fp16"],
)
def test_a_mistake_of_many_rows_is_seen(
    line: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = with_mistake(tmp_path, "sm80/int4_24_many", line, instead)
    assert worst(HostKernels(tmp_path, True, wrong, together=3), monkeypatch, MANY, 30, 192, 320) > 0


@on_host
def test_activations_that_count_before_they_are_written_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last thread begins, so the first one of a block is ahead of others."""
    line = "                __syncthreads();  // all activations of the previous item are written\n"
    wrong = with_mistake(tmp_path, "sm80/int4_24_many", line, "")
    assert worst(HostKernels(tmp_path, True, wrong, together=3), monkeypatch, replace(MANY, warps=4), 60, 64, 192) > 0


@on_host
def test_a_write_past_shared_memory_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm80_int4_24_fp16, "_ITEMS", sm80_int4_24_fp16._ITEMS - 16)
    assert worst(HostKernels(tmp_path), monkeypatch, MANY, 30, 192, 320) > 0


@on_host
@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("g / 4 * 32 + g % 4;", "g / 4 * 32 + g % 2;"),
        ("slabs >= SLABS)", "true)"),
        ("!= parts - 1) return;", "< 0) return;"),
        ("powers[first + row] = power.down", "powers[first] = power.down"),
        ("lane % 2 == 0\n", "true\n"),
    ],
    ids=["a channel twice", "half a stage", "not the last", "powers", "channels past the last"],
)
def test_a_mistake_of_hopper_is_seen(line: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = with_mistake(tmp_path, "sm90/int4_24_mlp", line, instead)
    assert worst(HostKernels(tmp_path, True, wrong, together=3), monkeypatch, FP16_90, 5, 192, 320) > 0


@pytest.mark.parametrize("arch", [ARCHES[8, 0], ARCHES[8, 6], HOPPER], ids=lambda arch: arch.name)
def test_plans_fit_and_a_prepared_layer_has_room(arch: object) -> None:
    """The first family is few, then one that sorts, for every T of DeepSeek-V3 and Qwen3-30B-A3B; scratch grows."""
    target = Target(H200, arch)  # type: ignore[arg-type]
    for E, H, I in ((256, 7168, 2048), (128, 2048, 768)):
        rooms = []
        for T in (1, 2, 3, 4, 8, 9, 33, 64, 65, 255, 256, 1000, 4096, 65536):
            problem = Problem(T, E, 8, H, I, weight_format=NAME)
            chosen = choose(problem, target)
            assert not isinstance(chosen, str)
            few, some, many = (INT4_24_FEW, INT4_24, INT4_24_FP16)
            if arch is HOPPER:
                few, some, many = (INT4_24_FEW_SM90, INT4_24_SM90, INT4_24_FP16_SM90)
            assert chosen.family is (few if T <= 3 else some if T * 8 <= many.least_rows * E else many)
            uses = chosen.family.uses(chosen.plan, ids64=True, add=False)
            assert all(use.shared_memory <= target.arch.shared_memory for use in uses)  # type: ignore[union-attr]
            rooms.append(most_bytes(problem, target))
            assert bytes_of(chosen.scratch) <= rooms[-1]
        assert rooms == sorted(rooms)


@pytest.mark.parametrize("K", [1, 8])
def test_rows_of_an_expert_on_average_take_one_tile_of_hopper(K: int) -> None:
    """Up to the largest tile, and in one that they fill to a quarter at least, but for the smallest."""
    for rows in (*range(1, 145), 2000):
        tile = INT4_24_FP16_SM90.tile(Problem(rows * 256 // K, 256, K, 7168, 2048, weight_format=NAME), HOPPER)
        assert min(rows, 144) <= tile.max_n <= max(8, 4 * rows), rows


@pytest.mark.parametrize(
    ("rows", "tile", "with_99_kib"),
    [
        (4, SparseManyTile(8, 16, 4, 3, blocks=2), SparseManyTile(8, 16, 2, 3, blocks=2)),
        (10, SparseManyTile(8, 16, 4, 3, blocks=2), SparseManyTile(8, 16, 2, 3, blocks=2)),
        (11, SparseManyTile(8, 32, 2, 3, blocks=2), SparseManyTile(8, 32, 2, 2, blocks=2)),
        (27, SparseManyTile(8, 48, 2, 3, blocks=2), SparseManyTile(8, 48, 2, 2, blocks=2)),
        (45, SparseManyTile(12, 80, 2, 3), SparseManyTile(12, 80, 2, 3)),
        (73, SparseManyTile(8, 144, 2, 3), SparseManyTile(8, 144, 2, 2)),
    ],
    ids=str,
)
def test_rows_of_an_expert_on_average_choose_the_tile(
    rows: int, tile: SparseManyTile, with_99_kib: SparseManyTile
) -> None:
    problem = Problem(rows * 32, 256, 8, 7168, 2048, weight_format=NAME)
    assert INT4_24_FP16.tile(problem, ARCHES[8, 0]) == tile
    assert INT4_24_FP16.tile(problem, ARCHES[8, 6]) == with_99_kib


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_other_problems_are_refused(family: object) -> None:
    for change, words in (
        ({"weight_format": "dense"}, "int4_24 weights, not 'dense'"),
        ({"dtype": torch.float16}, "multiplies bf16, not float16"),
        ({"H": 96}, "multiples of 64, not 96"),
        ({"K": 17}, "K up to 16"),
    ):
        sizes = {"T": 1, "E": 30, "K": 2, "H": 128, "I": 64, "weight_format": NAME} | change
        for fp16_scales in (True, False):  # the reason that no other scales would mend comes first
            problem = Problem(**sizes, fp16_scales=fp16_scales)  # type: ignore[arg-type]
            reason = family.why_not(problem, Target(H200, HOPPER))  # type: ignore[attr-defined]
            assert reason is not None and words in reason


def test_scales_that_fp16_does_not_hold_take_another_family() -> None:
    sizes = Problem(512, 256, 8, 7168, 2048, weight_format=NAME), Target(H200, HOPPER)
    wide = replace(sizes[0], fp16_scales=False)
    chosen, other = choose(*sizes), choose(wide, sizes[1])
    assert not isinstance(chosen, str) and not isinstance(other, str)
    assert chosen.family is INT4_24_FP16_SM90 and other.family is INT4_24
    assert "fp16" in other.refused[INT4_24_FP16_SM90.name]


@pytest.mark.parametrize(
    ("H", "T", "eights"), [(7168, 1, 7), (7168, 2, None), (2048, 1, 2), (2048, 2, 4), (2048, 3, None), (6144, 1, 6)]
)
def test_rows_of_few_pairs_lie_evenly(H: int, T: int, eights: int | None) -> None:
    problem = Problem(T, 256, 8, H, 2048, torch.bfloat16, weight_format=NAME, device="cuda")
    assert even_eights(problem) == eights
