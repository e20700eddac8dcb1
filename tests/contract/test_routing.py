"""Routing's views and Placement, against brute force."""

from __future__ import annotations

from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.utils._python_dispatch import TorchDispatchMode

from routing_draws import padded_by_hand
from ttnn_moe import ContractError, Placement, Routing
from ttnn_moe.contract import step_capacity
from ttnn_moe.selfcheck.edges import CASES, Case


@st.composite
def routings(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int]:
    """ids with duplicates, -1 and ids out of range, int32 or int64."""
    T, K, E = draw(st.integers(0, 20)), draw(st.integers(1, 6)), draw(st.integers(1, 12))
    seed = draw(st.integers(0, 2**31))
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(-2, E + 2, (T, K), generator=g, dtype=draw(st.sampled_from([torch.int32, torch.int64])))
    return ids, torch.rand(T, K, generator=g), E


@settings(max_examples=150, deadline=None)
@given(routings())
def test_sorted_view(drawn) -> None:
    ids, weights, E = drawn
    view = Routing.from_topk(ids, weights, E).sorted
    T, K = ids.shape
    pairs = [(int(ids[t, k]), t, k) for t in range(T) for k in range(K) if 0 <= ids[t, k] < E]
    pairs.sort()
    assert view.expert_offsets.dtype == view.pairs.dtype == view.inverse.dtype == torch.int32
    assert view.expert_offsets.tolist() == [sum(p[0] < e for p in pairs) for e in range(E + 1)]
    assert view.pairs.shape == (T * K,)
    assert view.pairs[: len(pairs)].tolist() == [t * K + k for _, t, k in pairs]
    want = torch.full((T, K), -1, dtype=torch.int32)
    for row, (_, t, k) in enumerate(pairs):
        want[t, k] = row
    assert torch.equal(view.inverse, want)


@settings(max_examples=150, deadline=None)
@given(routings())
def test_padded_view(drawn) -> None:
    ids, weights, E = drawn
    view = Routing.from_topk(ids, weights, E).padded
    want = padded_by_hand(ids, weights, E)
    assert view.num_routed_tokens.tolist() == [len(row) for row in want]
    assert view.routed_tokens.shape == view.routed_token_weights.shape == (E, len(ids))
    for e, row in enumerate(want):
        assert view.routed_tokens[e, : len(row)].tolist() == [t for t, _ in row]
        assert view.routed_token_weights[e, : len(row)].tolist() == [w for _, w in row]


@settings(max_examples=150, deadline=None)
@given(routings(), st.sampled_from([1, 4, 32]))
def test_step_layout(drawn, align: int) -> None:
    ids, weights, E = drawn
    layout = Routing.from_topk(ids, weights, E).step_layout(align)
    want = padded_by_hand(ids, weights, E)
    T, K = ids.shape
    starts = layout.row_start.tolist()
    assert layout.capacity == T * K + (align - 1) * min(E, T * K)
    assert starts[-1] <= layout.capacity
    assert all(start % align == 0 for start in starts)
    for e, row in enumerate(want):
        tokens = layout.row_tokens[starts[e] : starts[e + 1]].tolist()
        assert tokens == [t for t, _ in row] + [-1] * (-len(row) % align)
    seen = set()
    for t in range(T):
        for k in range(K):
            row = int(layout.inverse[t, k])
            if row >= 0:
                e = int(ids[t, k])
                assert starts[e] <= row < starts[e + 1]
                assert int(layout.row_tokens[row]) == t
                assert float(layout.weights[t, k]) == dict(want[e])[t]
                seen.add(row)
    assert len(seen) == sum(len(row) for row in want)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_for_device(data) -> None:
    D, per = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    E = D * per
    mapping = torch.tensor(data.draw(st.permutations(range(E)))).view(D, per)
    placement = Placement.from_mapping(mapping.tolist())
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    ids, weights = torch.randint(-1, E + 1, (9, 3), generator=g), torch.rand(9, 3, generator=g)
    routing = Routing.from_topk(ids, weights, E, placement=placement)
    assert torch.equal(routing.device_expert_mapping, mapping.int())
    for d in range(D):
        local = routing.for_device(d)
        assert local.E == per
        for t in range(9):
            for k in range(3):
                e = int(ids[t, k])
                here = 0 <= e < E and int(placement.device_of[e]) == d
                want = mapping[d].tolist().index(e) if here else -1
                assert int(local.ids[t, k]) == want
        own = mapping[d].tolist()
        table = [own.index(e) if e in own else -1 for e in range(E)]
        assert placement.local_of(d).tolist() == table
        assert placement.local_table(d, torch.device("cpu")).tolist() == [*table, -1]
    assert D > 1 or torch.equal(placement.local_of(), placement.local_of(0)), "the one device is the default"


def test_bound_on_tokens_hides_the_rest() -> None:
    ids, weights = torch.randint(0, 4, (10, 2)), torch.rand(10, 2)
    whole = Routing.from_topk(ids[:6], weights[:6], 4)
    bound = Routing.from_topk(ids, weights, 4, num_tokens=torch.tensor([6], dtype=torch.int32))
    assert torch.equal(bound.padded.num_routed_tokens, whole.padded.num_routed_tokens)
    assert torch.equal(bound.sorted.expert_offsets, whole.sorted.expert_offsets)
    assert bool((bound.ids[6:] == -1).all())


def test_a_weight_of_nan_stays_with_its_expert() -> None:
    view = Routing.from_topk(torch.tensor([[0, 1, 1, 0]]), torch.tensor([[torch.nan, 2.0, 3.0, 4.0]]), 2).padded
    assert view.routed_token_weights[0].isnan().all() and view.routed_token_weights[1].tolist() == [5.0]


def test_zero_copy_of_plain_inputs() -> None:
    ids, weights = torch.zeros(4, 2, dtype=torch.int32), torch.rand(4, 2)
    routing = Routing.from_topk(ids, weights, 3)
    assert routing.topk_ids.data_ptr() == ids.data_ptr()
    assert routing.topk_weights.data_ptr() == weights.data_ptr()


@pytest.mark.parametrize("case", [c for c in CASES if "range" in c.name or "int64" in c.name], ids=str)
def test_checking_names_the_first_bad_id(case: Case) -> None:
    x = case.make(torch.float32)
    t, k = ((x.ids < -1) | (x.ids >= case.E)).nonzero()[0].tolist()
    with pytest.raises(ContractError, match=f"t={t}, k={k}") as error:
        Routing.from_topk(x.ids, x.weights, case.E, check=True)
    assert str(int(x.ids[t, k])) in str(error.value)


def _topk(T: int = 4, K: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(T, K, dtype=torch.int32), torch.rand(T, K)


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda i, w: Routing.from_topk(i, w[:, :1], 4), "do not fit together"),
        (lambda i, w: Routing.from_topk(i[0], w[0], 4), "do not fit together"),
        (lambda i, w: Routing.from_topk(i[:, :0], w[:, :0], 4), "K >= 1"),
        (lambda i, w: Routing.from_topk(i.float(), w, 4), "topk_ids has the wrong dtype"),
        (lambda i, w: Routing.from_topk(i, w.double(), 4), "topk_weights has the wrong dtype"),
        (lambda i, w: Routing.from_topk(i, w.to("meta"), 4), "different devices"),
        (lambda i, w: Routing.from_topk(i, w, 0), "E is no number of experts"),
        (lambda i, w: Routing.from_topk(i, w, 4, placement=Placement.uniform(6, 2)), "another number of experts"),
        (lambda i, w: Routing.from_topk(i, w, 4, num_tokens=torch.tensor(3)), "num_tokens has the wrong form"),
        (lambda i, w: Routing.from_topk(i, w, 4, num_tokens=i.to("meta")[0, 0]), r"\[\] int32 on cpu"),
        (lambda i, w: Routing.from_topk(i, w, 4).step_layout(0), "row_align"),
        (lambda i, w: Placement.uniform(6, 4), "E=6, D=4"),
        (lambda i, w: Placement.uniform(6, 0), "E=6, D=0"),
        (lambda i, w: Placement.uniform(0, 2), "E=0, D=2"),
        (lambda i, w: Placement.from_mapping([[0, 1], [2, 2]]), "not a partition"),
        (lambda i, w: Placement.from_mapping([[0, 1], [2]]), r"\[2, 1\]"),
        (lambda i, w: Placement.uniform(4, 2, rank=2), "rank"),
        (lambda i, w: Placement.uniform(4, 2).local_of(), "no such device"),
        (lambda i, w: Placement.uniform(4, 2).local_of(-1), "no such device in this placement; got -1"),
        (lambda i, w: Placement(torch.zeros(4, dtype=torch.int32)), "wrong form"),
    ],
)
def test_refusals(call, match: str) -> None:
    with pytest.raises(ContractError, match=match):
        call(*_topk())


@pytest.mark.parametrize("kind", [np.int8, np.int16, torch.tensor])
def test_narrow_integers_do_not_overflow(kind: Any) -> None:
    """Of E and of row_align."""
    ids, weights = torch.tensor([[0, 99]]).repeat(300, 1), torch.ones(300, 2)
    want, got = (Routing.from_topk(ids, weights, E) for E in (100, kind(100)))
    assert type(got.E) is int and torch.equal(got.padded.num_routed_tokens, want.padded.num_routed_tokens)
    assert got.step_layout(kind(100)).capacity == want.step_layout(100).capacity == 600 + 99 * 100
    assert step_capacity(300, 2, 100, kind(100)) == 600 + 99 * 100


def test_slots_of_the_padded_view_are_numbered_in_64_bits() -> None:
    """E * T may pass 2^31, which needs 16 GB: so the dtypes of the products are looked at."""

    class Products(TorchDispatchMode):
        found: ClassVar[list[torch.dtype]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mul.Tensor:
                self.found.append(out.dtype)
            return out

    routing = Routing.from_topk(*_topk(), 4)
    with Products() as products:
        _ = routing.padded
    assert torch.int64 in products.found and torch.int32 not in products.found


def test_rows_of_steps_that_int32_does_not_number_are_refused() -> None:
    """A row_align of 2^20 makes so many."""
    with pytest.raises(ContractError, match=r"too many rows; got T=512, K=4, E=2048, row_align=1048576: 2147483648"):
        step_capacity(512, 4, 2048, 1 << 20)
    assert step_capacity(512, 4, 2047, 1 << 20) == 2048 + 2047 * ((1 << 20) - 1) < 2**31
