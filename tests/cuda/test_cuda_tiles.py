"""The choice of families, tiles and scratch: pure functions, tested over all sizes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from cuda_gpus import gpu_of, pretend
from triton_offline import SHARED_KIB
from ttnn_moe import Experts, Problem, Routing
from ttnn_moe.cuda.arch import ARCHES, Arch, Target
from ttnn_moe.cuda.jit import load
from ttnn_moe.cuda.moe import run, sort
from ttnn_moe.cuda.moe.families import FAMILIES, choose
from ttnn_moe.cuda.moe.family import Call
from ttnn_moe.cuda.moe.pairs import tiles_bound
from ttnn_moe.cuda.moe.prepared import bytes_of, most_bytes
from ttnn_moe.cuda.moe.sm80 import SM80
from ttnn_moe.cuda.moe.sm80_mxfp4 import MXFP4
from ttnn_moe.cuda.moe.sort import Sorters, Words
from ttnn_moe.cuda.moe.sorted import Sorted
from ttnn_moe.cuda.moe.triton import TRITON, TRITON_FEW
from ttnn_moe.cuda.moe.triton_tiles import few_tiles, shared_memory, sorted_tiles
from ttnn_moe.cuda.moe.uses import Use
from ttnn_moe.sizes import ceil_div

CAPABILITIES = [divmod(c, 10) for c in SHARED_KIB]
PROBLEMS = st.builds(
    Problem,
    T=st.integers(1, 1 << 20),
    E=st.integers(1, 1024) | st.integers(1, 4096),
    K=st.integers(1, 128),
    H=st.integers(1, 16384),
    I=st.integers(1, 16384),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)


def _target(capability: tuple[int, int]) -> Target:
    return Target(gpu_of(capability), ARCHES.get(capability), "no code for it")


def _power_of_2(n: int) -> bool:
    return n & (n - 1) == 0


@given(PROBLEMS, st.sampled_from(CAPABILITIES))
def test_every_plan_fits(problem: Problem, capability: tuple[int, int]) -> None:
    gpu = gpu_of(capability)
    few, tiles = few_tiles(problem), sorted_tiles(problem, gpu)
    assert (few, tiles) == (few_tiles(problem), sorted_tiles(problem, gpu))
    assert shared_memory(tiles, problem.dtype.itemsize) <= gpu.shared_memory
    for tile in (few.gate_up, few.down, tiles.gate_up, tiles.down):
        assert all(_power_of_2(n) for n in (tile.n, tile.k, tile.warps))
        assert tile.warps <= 32 and tile.stages >= 1
    assert _power_of_2(tiles.m) and _power_of_2(tiles.sort_chunk) and _power_of_2(tiles.combine_h)
    # sums of a tile stay in registers: at most 128 fp32 values a thread
    assert tiles.m * 2 * tiles.gate_up.n <= tiles.gate_up.warps * 32 * 128
    assert min(tiles.m, tiles.gate_up.n, tiles.gate_up.k, tiles.down.n, tiles.down.k) >= 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_sort_has_no_more_chunks_than_a_grid_takes(dtype: torch.dtype) -> None:
    target = _target((9, 0))
    most = Problem(1, 128, 1, 16, 16, dtype)
    most = replace(most, T=(2**16 - 1) * sorted_tiles(replace(most, T=1 << 20), target.gpu).sort_chunk)
    assert TRITON.why_not(most, target) is None
    assert TRITON.why_not(replace(most, T=most.T + 1), target) == f"it sorts up to {most.T} pairs (T * K)"


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)])
def test_tiles_grow_with_rows_per_expert(capability: tuple[int, int]) -> None:
    tokens = (16, 128, 256, 1024, 4096, 65536)
    rows = [sorted_tiles(Problem(T, 128, 8, 2048, 768), gpu_of(capability)).m for T in tokens]
    assert rows == sorted(rows)
    assert rows[0] <= 32 and rows[-1] == 128


@given(
    st.integers(1, 1 << 20),
    st.integers(1, 4096),
    st.integers(1, 128),
    st.sampled_from([64, 40]),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.sampled_from(["dense", "int4_24", "mxfp4"]),
    st.sampled_from(CAPABILITIES),
    st.data(),
)
def test_a_prepared_layer_has_room_for_every_smaller_call(
    T: int, E: int, K: int, H: int, dtype: torch.dtype, form: str, capability: tuple[int, int], data: st.DataObject
) -> None:
    """Of every family that runs it, aligned or not, on one device or on some of the experts."""
    target, D = _target(capability), data.draw(st.sampled_from([D for D in (1, 2, 4) if E % D == 0]))
    whole = Problem(T, E, K, H, 64, dtype, weight_format=form, D=D)
    assume(form == "dense" or not isinstance(choose(whole, target), str))
    room = most_bytes(whole, target)
    for t in (T, data.draw(st.integers(1, T)), max(T // data.draw(st.integers(1, 50)), 1)):
        problem = replace(whole, T=t)
        able = [family for family in FAMILIES if family.why_not(problem, target) is None]
        assert able
        assert all(bytes_of(family.scratch(family.plan(problem, target))) <= room for family in able)


@pytest.mark.parametrize("family", [f for f in FAMILIES if isinstance(f, Sorted)], ids=lambda family: family.name)
def test_scratch_has_words_for_the_smallest_tiles(family: Sorted[Any]) -> None:
    """Else a plan of fewer tokens, in smaller tiles, could take more words than the one that scratch is made for."""
    tiles = [*family.tiles(), *family.checked_tiles()]
    for target in map(_target, ARCHES):
        problems = [Problem(1 << i, 128, 8, 2048, 768, weight_format=family.weight_format) for i in range(17)]
        able = [problem for problem in problems if family.why_not(problem, target) is None]
        own = {family.plan(problem, target).tile for problem in able}
        assert not family.tiles() or own <= set(family.candidates(target.arch)), "what a tuning compares"
        tiles += own
    assert tiles and family.least_tile <= min(tile.max_n for tile in tiles)


def test_scratch_has_words_for_a_sort_in_parts_on_one_of_two_devices() -> None:
    problem, target = Problem(300, 1000, 8, 64, 64, D=2), _target((8, 0))
    plan = SM80.plan(problem, target)
    assert plan.sorters.parts == 3
    assert 4 * plan.words.count <= SM80.scratch(plan)[2].bytes


@pytest.mark.parametrize(("H", "dropped"), [(96, "0"), (128, "1")])
def test_combine_drops_whole_lines_alone(H: int, dropped: str) -> None:
    """A line of 128 bytes that two rows share is still to be read."""
    plan = MXFP4.plan(Problem(64, 128, 8, H, 64, weight_format="mxfp4"), _target((8, 0)))
    assert plan.tile.read_once
    assert dict(MXFP4.uses(plan, ids64=False, add=False)[-1].spec.defines)["DISCARD"] == dropped


def test_a_prepared_layer_takes_little_more_than_its_activations() -> None:
    for T in (0, 1, 64, 4096, 32768):
        held = T * 8 * (2048 + 768) * 2
        for capability in CAPABILITIES:
            assert most_bytes(Problem(T, 128, 8, 2048, 768), _target(capability)) <= 1.02 * held + (1 << 14)


def test_few_tokens_are_not_sorted_unless_they_share_experts() -> None:
    def few(family: object, E: int, K: int) -> list[int]:
        problems = [Problem(T, E, K, 64, 64) for T in range(1, 99)]
        chosen = [choose(problem, _target((9, 0)), families=(family,)) for problem in problems]  # type: ignore[arg-type]
        return [problem.T for problem, found in zip(problems, chosen, strict=True) if not isinstance(found, str)]

    assert few(TRITON_FEW, 128, 8) == [1, 2, 3, 4]
    assert few(TRITON_FEW, 48, 4) == [1, 2, 3, 4], "T * K is E / 3"
    assert few(TRITON_FEW, 8, 2) == few(TRITON_FEW, 8, 4) == [1], "one token is not sorted"
    assert few(TRITON_FEW, 4096, 128) == []
    assert few(FAMILIES[0], 128, 8) == [1, 2, 3]


def test_tensors_that_are_not_aligned_run_on_the_next_family() -> None:
    for T, aligned, other in ((1, "few", "triton_few"), (100, "sm90", "triton")):
        problem = Problem(T, 128, 8, 64, 64)
        for lie, name in ((True, aligned), (False, other)):
            chosen = choose(problem, _target((9, 0)), aligned=lie)
            assert not isinstance(chosen, str) and chosen.family.name == name
    assert "; sm90 does not: a tensor begins at no multiple of 16 bytes;" in str(chosen)
    assert str(choose(Problem(9, 5000, 8, 64, 64), _target((9, 0)))).count("experts") == 2


@given(PROBLEMS, st.sampled_from(list(ARCHES.values())))
def test_a_block_that_sorts_fits_and_has_a_thread_for_each_expert(problem: Problem, arch: Arch) -> None:
    assume(problem.E <= 1024 and sort.why_not(problem.E, arch) is None)
    sorters = sort.choose(problem, arch)
    assert sorters.shared_memory(problem.E) <= arch.shared_memory
    assert problem.E <= sorters.threads <= 1024 and _power_of_2(sorters.threads)
    assert 1 <= sorters.parts <= sort.MOST_PARTS and min(sorters.cluster, sorters.parts) == 1
    *counts, last = sort.sort_uses(arch, sorters, problem.E, ids64=False, granule=8)
    assert last.shared_memory == sorters.shared_memory(problem.E)
    assert [count.shared_memory for count in counts] == [4 * problem.E] * (sorters.parts > 1), "int32 counts"


@pytest.mark.parametrize(
    ("capability", "pairs", "sorters"),
    [
        ((9, 0), 1, Sorters(128)),
        ((9, 0), 512, Sorters(512)),
        ((9, 0), 513, Sorters(128, cluster=8)),
        ((9, 0), 1 << 20, Sorters(1024, cluster=8)),
        ((8, 0), 2048, Sorters(1024)),
        ((8, 0), 2049, Sorters(1024, parts=3)),
        ((8, 0), 1 << 20, Sorters(1024, parts=sort.MOST_PARTS)),
    ],
    ids=str,
)
def test_more_blocks_sort_more_pairs(capability: tuple[int, int], pairs: int, sorters: Sorters) -> None:
    """One block up to 512 pairs on Hopper, and up to 2,048 before; it has a thread for each pair, 128 to 1,024."""
    assert sort.choose(Problem(pairs, 8, 1, 64, 64), ARCHES[capability]) == sorters


@given(st.integers(0, 999), st.integers(1, 99), st.sampled_from([8, 16]), st.integers(1, 5))
def test_the_words_of_a_sort_are_aligned_and_do_not_overlap(P: int, E: int, m: int, parts: int) -> None:
    """A tile is read as one int4 of CUDA: 16 bytes at a multiple of 16."""
    words = Words.of(P, E, m, parts)
    places = (0, words.inverse, words.tiles, words.num_tiles, words.counts)
    assert all(place % 16 == 0 for place in places)
    rows, inverse, tiles, num_tiles = (after - place for place, after in itertools.pairwise(places))
    assert 4 * P <= min(rows, inverse) and (tiles, num_tiles) == (16 * tiles_bound(P, E, m), 16)
    assert words.count - words.counts // 4 == (parts * E if parts > 1 else 0)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("sorters", [Sorters(128), Sorters(128, cluster=8), Sorters(128, parts=5)], ids=str)
def test_a_sort_in_parts_waits_for_their_counts(sorters: Sorters, beside: bool) -> None:
    """It reads what the launch before wrote, and only another sort may run beside its predecessor."""
    uses = sort.sort_uses(ARCHES[9, 0], sorters, 8, ids64=False, granule=8, beside=beside)
    late = [dict(use.spec.defines).get("WAIT_LATE") == "1" for use in uses]
    assert late == ([False, False] if sorters.parts > 1 else [beside])


@pytest.mark.parametrize("sorters", [Sorters(128), Sorters(256, cluster=8), Sorters(128, parts=5)], ids=str)
def test_a_sort_runs_on_all_its_blocks(sorters: Sorters, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer would sort as well, and take longer."""
    grids: list[tuple[tuple[int, ...], int]] = []
    monkeypatch.setattr(load, "Launch", lambda spec, device, grid, block, *last, **options: grids.append((grid, block)))
    uses = sort.sort_uses(ARCHES[9, 0], sorters, 8, ids64=False, granule=8)
    sort.bind_sorts(uses, sorters, 0, 9, 8, 8, 1, 16)
    assert grids == [((sorters.cluster * sorters.parts,), sorters.threads)] * len(uses)


@pytest.mark.parametrize(
    ("H", "blocks", "threads"), [(64, 1, 32), (320, 1, 64), (2048, 1, 256), (2112, 2, 256), (7168, 4, 256)]
)
def test_threads_of_a_combine(H: int, blocks: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight channels each; at most 256 in a block."""
    monkeypatch.setattr(load, "Launch", lambda spec, device, grid, block, *last, **options: (grid, block))
    assert sort.bind_combine(Use.of(ARCHES[9, 0], "common/combine"), 0, 5, H) == ((5, blocks), threads)


@given(st.lists(st.integers(0, 500), min_size=1, max_size=40), st.sampled_from([16, 32, 64, 128]))
def test_bound_on_tiles_holds_for_every_routing(rows_of: list[int], m: int) -> None:
    used = sum(ceil_div(n, m) for n in rows_of)
    assert used <= tiles_bound(sum(rows_of), len(rows_of), m)


@pytest.mark.parametrize("name", [None, "hidden", "out", "gate_up", "down"])
def test_tensors_at_an_odd_address_run_in_triton(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    """The copies of CUDA C++ kernels take 16 bytes at a multiple of 16."""
    T, K, E, H, I = 40, 2, 8, 128, 64
    pretend(monkeypatch, gpu_of((9, 0)))
    run.chosen_of.cache_clear()

    def zeros(at: str, *shape: int) -> torch.Tensor:
        room = torch.zeros(torch.Size(shape).numel() + 16, dtype=torch.bfloat16)
        first = -room.data_ptr() // 2 % 8 + (at == name)
        return room[first : first + torch.Size(shape).numel()].view(shape)

    experts = Experts.dense(zeros("gate_up", E, 2 * I, H), zeros("down", E, H, I))
    routing = Routing.from_topk(torch.zeros(T, K, dtype=torch.int32), torch.ones(T, K), E)
    call = Call(zeros("hidden", T, H), routing, experts, zeros("out", T, H), accumulate=False)
    assert run.chosen_for(call).family.name == ("sm90" if name is None else "triton")
    run.chosen_of.cache_clear()
