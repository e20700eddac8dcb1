"""Every case of the contract on every backend: the fused operator, the steps, the prepared layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import ttnn_moe
from assertions import assert_close
from targets import Target
from ttnn_moe import BackendUnavailable, Placement, Problem, registry
from ttnn_moe.selfcheck.bounds import BOUND, POISON, poisoned, token_errors
from ttnn_moe.selfcheck.edges import CASES, Case, Inputs
from ttnn_moe.selfcheck.oracle import oracle


def _prepared(runnable: Target, case: Case, dtype: torch.dtype, seed: int = 0):
    """Inputs on the target's device, their routing, and the backend (skips what it says that it cannot run)."""
    if dtype not in runnable.dtypes:
        pytest.skip(f"{runnable.backend} has no {dtype}")
    inputs = case.make(dtype, seed)
    there = inputs.to(runnable.device)
    routing, problem = there.routing(), there.problem
    if reason := registry.why_not(problem).get(runnable.backend):
        with pytest.raises(BackendUnavailable, match="cannot run here"):
            ttnn_moe.moe(there.hidden, routing, there.experts, backend=runnable.backend)
        pytest.skip(f"refused, with a reason: {reason}")
    return inputs, there, routing, registry.choose(problem, runnable.backend), problem


def _promise(inputs: Inputs) -> str:
    """What a caller may promise of these ids."""
    ids = inputs.ids.sort(1).values
    valid = (ids >= 0) & (ids < inputs.experts.E)
    return "distinct" if bool(valid.all()) and not bool((ids[:, 1:] == ids[:, :-1]).any()) else "any"


def _want(inputs: Inputs, numerics=None, out=None) -> torch.Tensor:
    return oracle(inputs.hidden, inputs.counted_ids, inputs.weights, inputs.experts, numerics, out)


def _check(out: torch.Tensor, want: torch.Tensor, inputs: Inputs, dtype: torch.dtype, what: str) -> None:
    out = out.cpu()
    n = len(out) if inputs.num_tokens is None else inputs.num_tokens
    good = [t for t in range(n) if t not in inputs.spoiled]
    assert_close(out[good], want[good], dtype, what)
    for t in inputs.spoiled:
        assert not out[t].isfinite().all(), f"{what}: token {t} had NaN or Inf put in, and its output hides it"
    if inputs.num_tokens is not None:
        assert bool((out[n:] == out.new_tensor(POISON)).all()), f"{what}: rows past num_tokens were written"


DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", CASES, ids=str)
class TestCases:
    def test_fused(self, runnable: Target, case: Case, dtype: torch.dtype, record_property) -> None:
        inputs, there, routing, backend, problem = _prepared(runnable, case, dtype)
        want = _want(inputs, backend.numerics(problem))
        out = poisoned(case.T, case.H, dtype=dtype, device=runnable.device)
        same = ttnn_moe.moe(there.hidden, routing, there.experts, out=out, backend=runnable.backend)
        assert same is out
        _check(out, want, inputs, dtype, "fused")
        good = [t for t in range(inputs.num_tokens or case.T) if t not in inputs.spoiled]
        if good:
            record_property("fp64_error", float(token_errors(out[good], _want(inputs)[good]).max()))
        again = poisoned(case.T, case.H, dtype=dtype, device=runnable.device)
        ids = _promise(inputs)  # it changes no number
        ttnn_moe.moe(there.hidden, routing, there.experts, out=again, backend=runnable.backend, ids=ids)
        assert torch.equal(out.view(torch.uint8), again.view(torch.uint8)), "two runs differ"
        if ids == "distinct" and inputs.num_tokens is None:  # a new tensor
            new = ttnn_moe.moe(there.hidden, routing, there.experts, backend=runnable.backend, ids=ids)
            assert torch.equal(out.view(torch.uint8), new.view(torch.uint8)), "out changes the result"

    def test_fp32_out_and_accumulate(self, runnable: Target, case: Case, dtype: torch.dtype) -> None:
        inputs, there, routing, backend, problem = _prepared(runnable, case, dtype)
        out = poisoned(case.T, case.H, dtype=torch.float32, device=runnable.device)
        ttnn_moe.moe(there.hidden, routing, there.experts, out=out, backend=runnable.backend)
        want = _want(inputs, backend.numerics(problem))
        _check(out, want, inputs, dtype, "fp32 out")
        if inputs.num_tokens is not None or not case.accumulates:
            return
        start = torch.randn(case.T, case.H)
        for kind in {dtype, torch.float32}:
            into = start.to(kind)
            added = into.to(runnable.device, copy=True)
            ttnn_moe.moe(there.hidden, routing, there.experts, out=added, accumulate=True, backend=runnable.backend)
            _check(added, _want(inputs, backend.numerics(problem), into), inputs, dtype, "accumulate")

    def test_steps(self, runnable: Target, case: Case, dtype: torch.dtype) -> None:
        inputs, there, routing, backend, problem = _prepared(runnable, case, dtype)
        if inputs.num_tokens is not None:
            pytest.skip("a bound on T is for the whole operator")
        name, align = runnable.backend, runnable.row_align
        gate = ttnn_moe.gate_projection(there.hidden, routing, there.experts, row_align=align, backend=name)
        up = ttnn_moe.up_projection(there.hidden, routing, there.experts, row_align=align, backend=name)
        fused = ttnn_moe.gate_up(there.hidden, routing, there.experts, row_align=align, backend=name)
        layout = routing.step_layout(align)
        for tensor in (gate, up, fused):
            assert tensor.shape == (layout.capacity, case.I)
            assert tensor.dtype == dtype
        self._check_rows(inputs, layout, gate, up, fused, dtype)
        act = ttnn_moe.silu_mul(gate, up, backend=name)
        for what, rows in (("steps", act), ("gate_up + down", fused)):
            out = poisoned(case.T, case.H, dtype=dtype, device=runnable.device)
            ttnn_moe.down_projection(rows, routing, there.experts, row_align=align, out=out, backend=name)
            _check(out, _want(inputs, backend.numerics(problem)), inputs, dtype, what)
            if not case.accumulates:
                continue
            start = torch.randn(case.T, case.H).to(dtype)
            out = start.to(runnable.device, copy=True)
            ttnn_moe.down_projection(
                rows, routing, there.experts, row_align=align, out=out, accumulate=True, backend=name
            )
            _check(out, _want(inputs, backend.numerics(problem), start), inputs, dtype, what + ", added")

    @staticmethod
    def _check_rows(inputs, layout, gate, up, fused, dtype) -> None:
        """Each row of each step tensor against the token and expert it belongs to."""
        starts, tokens = layout.row_start.tolist(), layout.row_tokens.tolist()
        rows, want = [], {"gate": [], "up": [], "gate_up": []}
        for e in range(inputs.experts.E):
            gate_up, _ = inputs.experts.dequantize(e)
            for row in range(starts[e], starts[e + 1]):
                t = tokens[row]
                if t < 0 or t in inputs.spoiled:
                    continue
                both = gate_up.double() @ inputs.hidden[t].double()
                g, u = both[: inputs.experts.I], both[inputs.experts.I :]
                rows.append(row)
                for name, value in (("gate", g), ("up", u), ("gate_up", g * torch.sigmoid(g) * u)):
                    want[name].append(value)
        for name, got in (("gate", gate), ("up", up), ("gate_up", fused)):
            if rows:
                assert_close(got.cpu()[rows], torch.stack(want[name]), dtype, name)

    def test_prepared(self, runnable: Target, case: Case, dtype: torch.dtype) -> None:
        inputs, there, routing, backend, problem = _prepared(runnable, case, dtype)
        layer = ttnn_moe.prepare(
            Problem.of(case.T + 5, case.K, there.experts, dtype),
            there.experts,
            backend=runnable.backend,
            ids=_promise(inputs),
        )
        want = _want(inputs, backend.numerics(problem))
        for _ in range(2):  # the second call finds a used workspace
            out = poisoned(case.T, case.H, dtype=dtype, device=runnable.device)
            layer(there.hidden, there.ids, there.weights, out=out, num_tokens=routing.num_tokens)
            _check(out, want, inputs, dtype, "prepared")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_bitwise_repeatable(runnable: Target, dtype: torch.dtype) -> None:
    case = next(case for case in CASES if case.name == "skewed")
    _, there, routing, _, _ = _prepared(runnable, case, dtype)
    outs = [ttnn_moe.moe(there.hidden, routing, there.experts, backend=runnable.backend) for _ in range(20)]
    assert all(torch.equal(outs[0], out) for out in outs[1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_prepared_for_a_mesh_with_a_token_bound(runnable: Target, dtype: torch.dtype) -> None:
    """Where one device stands for the mesh, the sums over its devices are scratch, and rows past the bound too."""
    case = next(case for case in CASES if case.name == "token_bound")
    inputs, there, routing, backend, _ = _prepared(runnable, case, dtype)
    if runnable.backend not in ("reference", "cuda"):
        pytest.skip("a mesh needs its devices")
    placement = Placement.uniform(case.E, 2)
    problem = Problem.of(case.T, case.K, there.experts, dtype, D=2)
    layer = ttnn_moe.prepare(problem, there.experts, placement, backend=runnable.backend)
    want = _want(inputs, backend.numerics(problem))
    layer(there.hidden, there.ids, there.weights)  # a used workspace: no bound here
    out = poisoned(case.T, case.H, dtype=dtype, device=runnable.device)
    layer(there.hidden, there.ids, there.weights, out=out, num_tokens=routing.num_tokens)
    _check(out, want, inputs, dtype, "prepared for a mesh")


@pytest.mark.parametrize("D", [1, 2])
def test_one_rank_in_an_order_of_its_own(runnable: Target, D: int) -> None:
    """Ids of calls are global; a rank holds its experts in the order of its placement."""
    case = replace(CASES[0], E=8)
    dtype = runnable.dtypes[-1]
    _, there, _, _, _ = _prepared(runnable, case, dtype)
    if runnable.backend not in ("reference", "cuda", "ascend"):
        pytest.skip("a mesh needs its devices")
    order = [3, 6, 0, 7, 2, 5, 1, 4]
    total = torch.zeros(case.T, case.H, device=runnable.device)
    for rank in range(D):
        placement = Placement.from_mapping([order[d::D] for d in range(D)], rank)
        problem = Problem.of(case.T, case.K, there.experts, dtype, torch.float32, D=D)
        layer = ttnn_moe.prepare(problem, there.experts.for_device(placement), placement, backend=runnable.backend)
        layer(there.hidden, there.ids, there.weights, out=total, accumulate=True)
    want = ttnn_moe.moe(there.hidden, there.routing(), there.experts, backend="reference")
    assert_close(total.to(dtype), want, dtype, f"D={D}")


@pytest.mark.parametrize("seed", range(3))
def test_bound_catches_one_wrong_token(seed: int) -> None:
    """The metric itself: one token of many routed to a wrong expert, or with a swapped weight, must fail."""
    case = CASES[0]
    inputs = case.make(torch.bfloat16, seed)
    want = _want(inputs)
    wrong = inputs.ids.clone()
    wrong[seed, 0] = next(e for e in range(case.E) if e not in wrong[seed].tolist())
    out = oracle(inputs.hidden, wrong, inputs.weights, inputs.experts)
    assert float(token_errors(out, want).max()) > BOUND[torch.bfloat16]
    with pytest.raises(AssertionError, match=f"token {seed} "):
        assert_close(out, want, torch.bfloat16)
    nan = want.clone()
    nan[4, 0] = float("nan")
    with pytest.raises(AssertionError, match="token 4"):
        assert_close(nan, want, torch.bfloat16)
