"""The CUDA C++ kernels on Hopper, every plan of them, whatever the backend would choose."""

from __future__ import annotations

import random

import pytest
import torch
from cases import CASES, Case
from hypothesis import given
from hypothesis import strategies as st
from numerics import assert_close, poisoned
from oracle import oracle

import ttnn_moe
from ttnn_moe import Experts, Placement, Problem, Routing
from ttnn_moe.backend import Numerics
from ttnn_moe.cuda import run
from ttnn_moe.cuda.native import plan as native
from ttnn_moe.cuda.native.plan import Few, Gemm, Sorted

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="no GPU of compute capability 9.0 is here")]

PLANS = {
    "few": Few(),
    "n64": Sorted(Gemm(64, 9, 128), 128, 1),
    "n32": Sorted(Gemm(32, 10, 128), 256, 1),
    "n176": Sorted(Gemm(176, 3), 512, 8),
    "n160": Sorted(Gemm(160, 4), 1024, 8),
}


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> native.Plan:
    chosen = PLANS[request.param]
    monkeypatch.setattr(native, "choose", lambda T, E, K: chosen)
    run.plan_of.cache_clear()
    request.addfinalizer(run.plan_of.cache_clear)
    return chosen


def _numerics(plan: native.Plan, dtype: torch.dtype) -> Numerics:
    return Numerics(activation=dtype, expert_out=None if isinstance(plan, Few) else dtype)


def _serves(case: Case) -> bool:
    return native.why_not(case.T, case.E, case.K, case.H, case.I, 2, (9, 0)) is None


@given(st.integers(0, 1 << 18), st.integers(1, 1024), st.integers(1, 16))
def test_every_plan_fits(T: int, E: int, K: int) -> None:
    plan = native.choose(T, E, K)
    for sorted_plan in (plan, native.many(max(T, 1), E, K)):
        if isinstance(sorted_plan, Sorted):
            assert sorted_plan.gemm.shared_memory <= native.SHARED_MEMORY
            assert sorted_plan.sort_threads >= E and sorted_plan.sort_threads % 32 == 0
            assert (sorted_plan.sort_threads // 32 + 2) * E * 4 + 1024 <= native.SHARED_MEMORY
            assert sorted_plan.gemm.max_n % 16 == 0 and sorted_plan.gemm.max_n <= 192


def test_why_not() -> None:
    assert native.why_not(9, 128, 8, 2048, 768, 2, (9, 0)) is None
    for change, words in [
        ({"capability": (8, 0)}, "compute capability 9.0, not 8.0"),
        ({"itemsize": 4}, "bf16 and fp16"),
        ({"H": 2080}, "multiples of 64, not 2080 and 768"),
        ({"K": 17}, "K up to 16"),
        ({"E": 1025}, "1024 experts"),
        ({"T": 1 << 26}, "2\\^35"),
    ]:
        sizes = {"T": 9, "E": 128, "K": 8, "H": 2048, "I": 768, "itemsize": 2, "capability": (9, 0)} | change
        with pytest.raises(AssertionError, match=words):
            raise AssertionError(native.why_not(**sizes))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", [case for case in CASES if _serves(case)], ids=str)
class TestCases:
    pytestmark = on_hopper

    def test_case(self, case: Case, dtype: torch.dtype, plan: native.Plan) -> None:
        x = case.make(dtype)
        there = x.to("cuda")
        ids = x.ids.clone()
        bound = None
        if x.num_tokens is not None:
            ids[x.num_tokens :] = -1
            bound = torch.tensor(x.num_tokens, dtype=torch.int32, device="cuda")
        routing = Routing.from_topk(there.ids, there.weights, case.E, num_tokens=bound)
        for kind in (dtype, torch.float32):
            for start in (None, torch.randn(case.T, case.H).to(kind)):
                if start is not None and bound is not None:
                    continue
                out = poisoned(case.T, case.H, dtype=kind, device="cuda")
                if start is not None:
                    out.copy_(start)
                ttnn_moe.moe(
                    there.hidden, routing, there.experts, out=out, accumulate=start is not None, backend="cuda"
                )
                want = oracle(x.hidden, ids, x.weights, x.experts, _numerics(plan, dtype), start)
                n = case.T if x.num_tokens is None else x.num_tokens
                good = [t for t in range(n) if t not in x.spoiled]
                assert_close(out.cpu()[good], want[good], dtype, f"{kind}, start {start is not None}")
                assert all(not out[t].isfinite().all() for t in x.spoiled)
                assert bool((out[n:] == 1e4).all()), "rows past num_tokens were written"


def _experts(E: int, H: int, I: int, dtype: torch.dtype = torch.bfloat16, order: str = "halves") -> Experts:
    gate_up = torch.randn(E, 2 * I, H, device="cuda", dtype=dtype) * H**-0.5
    down = torch.randn(E, H, I, device="cuda", dtype=dtype) * I**-0.5
    return Experts.dense(gate_up, down, gate_up_order=order)


def _routing(T: int, E: int, K: int, skew: float = 0.0) -> Routing:
    scores = torch.rand(T, E, device="cuda").log() / torch.arange(1, E + 1, device="cuda") ** -skew
    weights, ids = torch.softmax(scores, -1).topk(K)
    return Routing.from_topk(ids.int(), weights / weights.sum(-1, keepdim=True), E)


def _fp64(hidden: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
    """The operator in fp64 on the GPU."""
    out = torch.zeros(hidden.shape, dtype=torch.float64, device="cuda")
    x, I = hidden.double(), experts.I
    for e in range(experts.E):
        t, k = (routing.topk_ids == e).nonzero(as_tuple=True)
        if len(t):
            h = x[t] @ experts.tensors["gate_up"][e].double().T
            pair = (h[:, 0::2], h[:, 1::2]) if experts.gate_up_order == "interleaved" else (h[:, :I], h[:, I:])
            y = (torch.nn.functional.silu(pair[0]) * pair[1]) @ experts.tensors["down"][e].double().T
            out.index_add_(0, t, y * routing.topk_weights[t, k].double()[:, None])
    return out


class TestDraws:
    pytestmark = on_hopper

    @pytest.mark.parametrize("seed", range(200))
    def test_random_draw(self, seed: int) -> None:
        """What the backend itself chooses, at sizes that these kernels serve."""
        rng = random.Random(seed)
        torch.manual_seed(seed)
        E = rng.choice([1, 2, 7, 32, 128, 300])
        K = rng.randint(1, min(E, 16))
        T = rng.choice([1, 2, 4, 9, 60, 333, 1000, 2500])
        H, I = 64 * rng.randint(1, 16), 64 * rng.randint(1, 12)
        dtype = rng.choice([torch.bfloat16, torch.float16])
        experts = _experts(E, H, I, dtype, rng.choice(["halves", "interleaved"]))
        routing = _routing(T, E, K, rng.choice([0.0, 0.3, 0.8]))
        hidden = torch.randn(T, H, device="cuda").to(dtype)
        out = poisoned(T, H, dtype=dtype, device="cuda")
        ttnn_moe.moe(hidden, routing, experts, out=out, backend="cuda")
        want = _fp64(hidden, routing, experts)
        worst = ((out.double() - want).norm(dim=1) / want.norm(dim=1).clamp_min(want.norm(dim=1).median() / 10)).max()
        assert float(worst) < 1e-2, f"T={T} E={E} K={K} H={H} I={I} {dtype}: {float(worst):.2e}"

    @pytest.mark.parametrize("T", [4, 700, 5000])
    def test_twenty_repetitions_have_the_same_bits(self, plan: native.Plan, T: int) -> None:
        if isinstance(plan, Few) and T > 100:
            pytest.skip("many tokens, few-token kernels")
        experts, routing = _experts(32, 256, 128), _routing(T, 32, 8, 0.3)
        hidden = torch.randn(T, 256, device="cuda").bfloat16()
        first = ttnn_moe.moe(hidden, routing, experts, backend="cuda")
        for _ in range(20):
            again = poisoned(T, 256, dtype=torch.bfloat16, device="cuda")
            ttnn_moe.moe(hidden, routing, experts, out=again, backend="cuda")
            assert torch.equal(first.view(torch.int16), again.view(torch.int16))

    def test_a_graph_serves_every_routing(self, plan: native.Plan) -> None:
        T, E, K, H, I = 300, 16, 4, 256, 192
        experts, routing = _experts(E, H, I), _routing(T, E, K)
        layer = ttnn_moe.prepare(Problem.of(T, K, experts, torch.bfloat16), experts, backend="cuda")
        hidden, ids, weights = (
            torch.randn(T, H, device="cuda").bfloat16(),
            routing.topk_ids.clone(),
            routing.topk_weights,
        )
        out = layer(hidden, ids, weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                layer(hidden, ids, weights, out=out)
        for other in (torch.full_like(ids, 3), torch.full_like(ids, -1), _routing(T, E, K, 0.7).topk_ids):
            ids.copy_(other)
            hidden.normal_()
            out.fill_(1e4)
            graph.replay()
            want = _fp64(hidden, Routing.from_topk(ids, weights, E), experts)
            assert float((out.double() - want).norm(dim=1).max()) <= 1e-2 * float(want.norm(dim=1).median() + 1e-9)

    def test_weights_are_freed_with_their_tensors(self, plan: native.Plan) -> None:
        import gc

        def call() -> None:
            experts, routing = _experts(64, 1024, 512), _routing(4, 64, 4)
            ttnn_moe.moe(torch.randn(4, 1024, device="cuda").bfloat16(), routing, experts, backend="cuda")

        call()
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            call()
        gc.collect()
        assert torch.cuda.memory_allocated() - before < 64 * 1024 * 512 * 2

    def test_devices_of_a_mesh(self, plan: native.Plan) -> None:
        T, E, K, H, I = 40, 16, 4, 128, 64
        experts, routing = _experts(E, H, I), _routing(T, E, K)
        hidden = torch.randn(T, H, device="cuda").bfloat16()
        problem = Problem.of(T, K, experts, torch.bfloat16, D=4)
        layer = ttnn_moe.prepare(problem, experts, Placement.uniform(E, 4), backend="cuda")
        out = layer(hidden, routing.topk_ids, routing.topk_weights)
        want = _fp64(hidden, routing, experts)
        assert float(((out.double() - want).norm(dim=1) / want.norm(dim=1)).max()) < 1e-2
