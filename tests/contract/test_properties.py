"""The operator over random T, E, K, H, I and routings."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, given, settings

import ttnn_moe
from assertions import assert_close
from targets import Target
from ttnn_moe import Problem, Routing, registry
from ttnn_moe.selfcheck.bounds import poisoned
from ttnn_moe.selfcheck.edges import Case
from ttnn_moe.selfcheck.oracle import oracle

SETTINGS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Case, int, str]:
    E = draw(st.integers(1, 40))
    case = Case(
        "drawn",
        T=draw(st.integers(0, 70)),
        E=E,
        K=draw(st.integers(1, min(8, E + 2))),
        H=64 * draw(st.integers(1, 3)),
        I=64 * draw(st.integers(1, 3)),
    )
    return case, draw(st.integers(0, 2**31)), draw(st.sampled_from(["spread", "skewed", "wild"]))


def draw_ids(case: Case, seed: int, how: str) -> torch.Tensor:
    """Spread over the experts, piled on a few, or anything at all."""
    g = torch.Generator().manual_seed(seed)
    if how == "wild":
        return torch.randint(-2, case.E + 3, (case.T, case.K), generator=g, dtype=torch.int32)
    high = case.E if how == "spread" else max(1, case.E // 8)
    return torch.randint(0, high, (case.T, case.K), generator=g, dtype=torch.int32)


@SETTINGS
@given(problems())
def test_matches_the_oracle(runnable: Target, drawn) -> None:
    case, seed, how = drawn
    dtype = runnable.dtypes[seed % len(runnable.dtypes)]
    x = case.make(dtype, seed)
    x.ids = draw_ids(case, seed, how)
    there = x.to(runnable.device)
    routing = Routing.from_topk(there.ids, there.weights, case.E)
    backend = registry.choose(Problem.of(case.T, case.K, there.experts, dtype), runnable.backend)
    numerics = backend.numerics(Problem.of(case.T, case.K, there.experts, dtype))
    want = oracle(x.hidden, x.ids, x.weights, x.experts, numerics)
    out = poisoned(case.T, case.H, dtype=dtype, device=runnable.device)
    assert_close(ttnn_moe.moe(there.hidden, routing, there.experts, out=out, backend=runnable.backend), want, dtype)


@SETTINGS
@given(problems())
def test_order_of_tokens_does_not_matter(runnable: Target, drawn) -> None:
    """A permutation of the tokens permutes the outputs."""
    case, seed, how = drawn
    dtype = runnable.dtypes[-1]
    x = case.make(dtype, seed)
    ids = draw_ids(case, seed, how)
    order = torch.randperm(case.T, generator=torch.Generator().manual_seed(seed))
    outs = []
    for rows in (slice(None), order):
        routing = Routing.from_topk(ids[rows].to(runnable.device), x.weights[rows].to(runnable.device), case.E)
        there = x.to(runnable.device)
        outs.append(ttnn_moe.moe(there.hidden[rows], routing, there.experts, backend=runnable.backend).cpu())
    assert_close(outs[1], outs[0][order].double(), dtype)
