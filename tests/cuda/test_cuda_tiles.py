"""The choice of kernels and tiles: a pure function, tested over all sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triton_offline import SHARED_KIB
from ttnn_moe.cuda.launch import sort_words, tiles_bound
from ttnn_moe.cuda.native import plan as native
from ttnn_moe.cuda.native.launch import sort_words as native_sort_words
from ttnn_moe.cuda.run import most_words
from ttnn_moe.cuda.tiles import Few, Sorted, choose, is_few, shared_memory

SIZES = {
    "T": st.integers(1, 1 << 20),
    "E": st.integers(1, 4096),
    "K": st.integers(1, 128),
    "H": st.integers(1, 16384),
    "I": st.integers(1, 16384),
    "itemsize": st.sampled_from([2, 4]),
    "capability": st.sampled_from([divmod(c, 10) for c in SHARED_KIB]),
}


def _power_of_2(n: int) -> bool:
    return n & (n - 1) == 0


@given(**SIZES)
def test_every_plan_fits(T: int, E: int, K: int, H: int, I: int, itemsize: int, capability: tuple[int, int]) -> None:
    plan = choose(T, E, K, H, I, itemsize, capability)
    assert plan == choose(T, E, K, H, I, itemsize, capability)
    major, minor = capability
    assert shared_memory(plan, itemsize) <= SHARED_KIB[10 * major + minor] << 10
    for tile in (plan.gate_up, plan.down):
        assert all(_power_of_2(n) for n in (tile.n, tile.k, tile.warps))
        assert tile.warps <= 32 and tile.stages >= 1
    assert isinstance(plan, Few) == is_few(T, E, K)
    if isinstance(plan, Sorted):
        assert _power_of_2(plan.m) and _power_of_2(plan.sort_chunk) and _power_of_2(plan.combine_h)
        # sums of a tile stay in registers: at most 128 fp32 values a thread
        assert plan.m * 2 * plan.gate_up.n <= plan.gate_up.warps * 32 * 128
        assert min(plan.m, plan.gate_up.n, plan.gate_up.k, plan.down.n, plan.down.k) >= 16


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)])
def test_tiles_grow_with_rows_per_expert(capability: tuple[int, int]) -> None:
    plans = [choose(T, 128, 8, 2048, 768, 2, capability) for T in (16, 128, 256, 1024, 4096, 65536)]
    rows = [plan.m for plan in plans if isinstance(plan, Sorted)]
    assert len(rows) == len(plans) and rows == sorted(rows)
    assert rows[0] <= 32 and rows[-1] == 128


@given(**{name: SIZES[name] for name in ("T", "E", "K")}, less=st.integers(1, 50))
def test_a_prepared_layer_has_words_for_every_smaller_call(T: int, E: int, K: int, less: int) -> None:
    room = most_words(T, E, K)
    for t in {T, max(T // less, 1)}:
        for capability in ((8, 0), (9, 0)):
            for itemsize in (2, 4):
                plan = choose(t, E, K, 64, 64, itemsize, capability)
                assert isinstance(plan, Few) or sort_words(t * K, E, plan) <= room
        assert native_sort_words(t * K, E, native.many(t, E, K)) <= room


def test_few_tokens_are_not_sorted_unless_they_share_experts() -> None:
    assert [T for T in range(1, 99) if is_few(T, 128, 8)] == [1, 2, 3, 4]
    assert [T for T in range(1, 99) if is_few(T, 8, 2)] == [1]
    assert not is_few(1, 4096, 128)


@given(st.lists(st.integers(0, 500), min_size=1, max_size=40), st.sampled_from([16, 32, 64, 128]))
def test_bound_on_tiles_holds_for_every_routing(rows_of: list[int], m: int) -> None:
    used = sum(-(-n // m) for n in rows_of)
    assert used <= tiles_bound(sum(rows_of), len(rows_of), m)
