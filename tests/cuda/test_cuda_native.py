"""The CUDA C++ kernels, every plan of them, whatever the backend would choose.

Those of sm_80 run on a newer GPU too, from PTX: `pytest -k sm80`.
"""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ttnn_moe
from cases import CASES, Case
from cuda_gpus import gpu_of
from cuda_layers import assert_same_bits, random_experts, random_routing, replays
from numerics import assert_close, poisoned
from oracle import oracle
from ttnn_moe import Experts, Placement, Problem, Routing
from ttnn_moe.backend import Numerics
from ttnn_moe.cuda import arch as arches
from ttnn_moe.cuda import run
from ttnn_moe.cuda.arch import ARCHES, HOPPER, Arch
from ttnn_moe.cuda.native import plan as native
from ttnn_moe.cuda.native.plan import Few, Gemm, Plan, Sorted
from ttnn_moe.cuda.native.sm80_tiles import MmaGemm
from ttnn_moe.errors import ContractError

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(CAPABILITY < (8, 0), reason="no GPU of compute capability 8.0 or newer is here"),
]


def _sm80() -> Arch:
    """The kernels of sm_80 as the GPU that is here runs them."""
    found = arches.find(gpu_of(max(CAPABILITY, (8, 0))), None if CAPABILITY[0] in (8, 12) else "sm_80")
    assert found is not None
    return found


HOPPER_PLANS: dict[str, Plan] = {
    "few": Few(),
    "n64": Sorted(Gemm(64, 9, 128, read_once=True), 128, 8),
    "n32": Sorted(Gemm(32, 10, 128, read_once=True), 256, 1),
    "n176": Sorted(Gemm(176, 3), 512, 8),
    "n160": Sorted(Gemm(160, 4), 1024, 8),
}
SM80_PLANS: dict[str, Plan] = {
    "sm80_few": Few(arch=_sm80()),
    "sm80_n32": Sorted(MmaGemm(32, 4), 128, 1, _sm80()),
    "sm80_n64": Sorted(MmaGemm(64, 3), 512, 1, _sm80()),
    "sm80_n128": Sorted(MmaGemm(128, 3), 1024, 1, _sm80()),
}
PLANS = HOPPER_PLANS | SM80_PLANS


@pytest.fixture(params=PLANS)
def plan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Plan:
    chosen = PLANS[request.param]
    if chosen.arch == HOPPER and CAPABILITY != (9, 0):
        pytest.skip("no GPU of compute capability 9.0 is here")
    monkeypatch.setattr(native, "choose", lambda T, E, K, arch: chosen)
    run.plan_of.cache_clear()
    request.addfinalizer(run.plan_of.cache_clear)
    return chosen


@pytest.fixture
def asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The architecture that TTNN_MOE_CUDA_ARCH asks for."""
    monkeypatch.setenv(arches.ENV, request.param)
    run.plan_of.cache_clear()
    request.addfinalizer(run.plan_of.cache_clear)
    return request.param


def _numerics(plan: Plan, dtype: torch.dtype) -> Numerics:
    return Numerics(activation=dtype, expert_out=None if isinstance(plan, Few) else dtype)


def _serves(case: Case) -> bool:
    return native.why_not(case.T, case.E, case.K, case.H, case.I, 2, HOPPER) is None


@given(st.integers(0, 1 << 18), st.integers(1, 1024), st.integers(1, 16), st.sampled_from(sorted(ARCHES)))
def test_every_plan_fits(T: int, E: int, K: int, capability: tuple[int, int]) -> None:
    arch = ARCHES[capability]
    if native.why_not(T, E, K, 64, 64, 2, arch) is not None:
        assert arch.shared_memory == 99 << 10 and E > 743
        return
    plan = native.choose(T, E, K, arch)
    assert plan == native.choose(T, E, K, arch) and plan.arch == arch
    for sorted_plan in (plan, native.many(max(T, 1), E, K, arch)):
        if isinstance(sorted_plan, Sorted):
            gemm, threads = sorted_plan.gemm, sorted_plan.sort_threads
            assert gemm.shared_memory <= arch.shared_memory
            assert E <= threads <= 1024 and threads % 32 == 0
            assert native.sort_memory(threads, E) <= arch.shared_memory
            if arch is HOPPER:
                assert isinstance(gemm, Gemm) and gemm.max_n % 16 == 0 and gemm.max_n <= 192
            else:
                assert isinstance(gemm, MmaGemm) and gemm.max_n % 32 == 0 and gemm.stages >= 2
                assert sorted_plan.sort_cluster == 1


def test_tiles_of_sm80_grow_with_rows_per_expert() -> None:
    for capability, stages in (((8, 0), [4, 3, 4]), ((8, 6), [4, 4, 3]), ((12, 0), [4, 4, 3])):
        gemms = [native.many(T, 128, 8, ARCHES[capability]).gemm for T in (64, 1024, 4096)]
        assert [gemm.max_n for gemm in gemms] == [32, 64, 128] and [gemm.stages for gemm in gemms] == stages


@pytest.mark.parametrize(
    ("capability", "asked_for", "name", "room"),
    [
        ((8, 0), None, "sm_80", 163),
        ((8, 9), None, "sm_89", 99),
        ((8, 9), "sm_80", "compute_80", 99),
        ((9, 0), None, "sm_90a", 227),
        ((9, 0), "sm_90a", "sm_90a", 227),
        ((9, 0), "sm_80", "compute_80", 163),
        ((9, 0), "sm_86", "compute_86", 99),
        ((10, 0), "sm_80", "compute_80", 163),
        ((12, 0), None, "sm_120f", 99),
        ((12, 1), "sm_80", "compute_80", 99),
    ],
)
def test_code_of_a_gpu(capability: tuple[int, int], asked_for: str | None, name: str, room: int) -> None:
    arch = arches.find(gpu_of(capability), asked_for)
    assert arch is not None and (arch.name, arch.shared_memory) == (name, room << 10)
    assert arch.products == ("sm90" if name == "sm_90a" else "sm80")
    assert arch.overlaps == (name in ("sm_90a", "sm_120f"))


def test_gpus_without_kernels() -> None:
    assert arches.find(gpu_of((10, 0))) is None and arches.find(gpu_of((7, 5))) is None


@pytest.mark.parametrize(
    ("capability", "name"),
    [((8, 0), "sm_90a"), ((8, 0), "sm_86"), ((9, 0), "sm_120f"), ((9, 0), "sm_70"), ((9, 0), "80")],
)
def test_code_that_a_gpu_does_not_run_is_refused(capability: tuple[int, int], name: str) -> None:
    with pytest.raises(ContractError, match=f"TTNN_MOE_CUDA_ARCH.*'{name}'.*sm_80.*unset"):
        arches.find(gpu_of(capability), name)


def test_why_not() -> None:
    assert native.why_not(9, 128, 8, 2048, 768, 2, HOPPER) is None
    assert native.why_not(9, 128, 8, 2048, 768, 2, ARCHES[8, 6]) is None
    assert native.why_not(9, 1024, 8, 2048, 768, 2, ARCHES[8, 0]) is None
    for change, words in [
        ({"arch": ARCHES[8, 6], "E": 1024}, "sm_86 has: 99 KiB"),
        ({"itemsize": 4}, "bf16 and fp16"),
        ({"H": 2080}, "multiples of 64, not 2080 and 768"),
        ({"K": 17}, "K up to 16"),
        ({"E": 1025}, "1024 experts"),
        ({"T": 1 << 26}, "2\\^35"),
    ]:
        sizes = {"T": 9, "E": 128, "K": 8, "H": 2048, "I": 768, "itemsize": 2, "arch": HOPPER} | change
        with pytest.raises(AssertionError, match=words):
            raise AssertionError(native.why_not(**sizes))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", [case for case in CASES if _serves(case)], ids=str)
class TestCases:
    pytestmark = on_gpu

    def test_case(self, case: Case, dtype: torch.dtype, plan: Plan) -> None:
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


def _draw(seed: int) -> None:
    """One call of random sizes and routing, against fp64."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    E = rng.choice([1, 2, 7, 32, 128, 300])
    K = rng.randint(1, min(E, 16))
    T = rng.choice([1, 2, 4, 9, 60, 333, 1000, 2500])
    H, I = 64 * rng.randint(1, 16), 64 * rng.randint(1, 12)
    dtype = rng.choice([torch.bfloat16, torch.float16])
    experts = random_experts(E, H, I, dtype, rng.choice(["halves", "interleaved"]))
    routing = random_routing(T, E, K, rng.choice([0.0, 0.3, 0.8]))
    hidden = torch.randn(T, H, device="cuda").to(dtype)
    out = poisoned(T, H, dtype=dtype, device="cuda")
    ttnn_moe.moe(hidden, routing, experts, out=out, backend="cuda")
    want = _fp64(hidden, routing, experts)
    worst = ((out.double() - want).norm(dim=1) / want.norm(dim=1).clamp_min(want.norm(dim=1).median() / 10)).max()
    assert float(worst) < 1e-2, f"T={T} E={E} K={K} H={H} I={I} {dtype}: {float(worst):.2e}"


class TestDraws:
    pytestmark = on_gpu

    @pytest.mark.parametrize("seed", range(200))
    def test_random_draw(self, seed: int) -> None:
        """What the backend itself chooses, at sizes that these kernels serve."""
        _draw(seed)

    @pytest.mark.skipif(CAPABILITY < (9, 0), reason="no GPU newer than compute capability 8.x is here")
    @pytest.mark.parametrize(
        ("seed", "asked"), [(i, "sm_80" if i % 2 else "sm_86") for i in range(200)], indirect=["asked"]
    )
    def test_random_draw_of_sm80(self, seed: int, asked: str) -> None:
        """What the backend chooses for an older GPU, from PTX."""
        plan = run.plan_of(100, 32, 4, 128, 128, 2, torch.device("cuda", 0))
        assert isinstance(plan, Sorted) and plan.arch.name == asked.replace("sm_", "compute_")
        _draw(1000 + seed)

    @pytest.mark.parametrize("T", [4, 700, 5000])
    def test_twenty_repetitions_have_the_same_bits(self, plan: Plan, T: int) -> None:
        if isinstance(plan, Few) and T > 100:
            pytest.skip("many tokens, few-token kernels")
        assert_same_bits(T)

    def test_more_tokens_than_a_grid_is_high(self) -> None:
        T, E = 70_000, 4
        experts, routing = random_experts(E, 64, 64), random_routing(T, E, 1)
        hidden = torch.randn(T, 64, device="cuda").bfloat16()
        out = ttnn_moe.moe(hidden, routing, experts, backend="cuda")
        want = _fp64(hidden, routing, experts)
        assert float(((out.double() - want).norm(dim=1) / want.norm(dim=1).median()).max()) < 2e-2

    def test_a_graph_serves_every_routing(self, plan: Plan) -> None:
        experts = random_experts(16, 256, 192)
        for hidden, routing, out in replays(experts, 300, 4, calls=3):
            want = _fp64(hidden, routing, experts)
            assert float((out.double() - want).norm(dim=1).max()) <= 1e-2 * float(want.norm(dim=1).median() + 1e-9)

    def test_weights_are_freed_with_their_tensors(self, plan: Plan) -> None:
        import gc

        def call() -> None:
            experts, routing = random_experts(64, 1024, 512), random_routing(4, 64, 4)
            ttnn_moe.moe(torch.randn(4, 1024, device="cuda").bfloat16(), routing, experts, backend="cuda")

        call()
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            call()
        gc.collect()
        assert torch.cuda.memory_allocated() - before < 64 * 1024 * 512 * 2

    def test_devices_of_a_mesh(self, plan: Plan) -> None:
        T, E, K, H, I = 40, 16, 4, 128, 64
        experts, routing = random_experts(E, H, I), random_routing(T, E, K)
        hidden = torch.randn(T, H, device="cuda").bfloat16()
        problem = Problem.of(T, K, experts, torch.bfloat16, D=4)
        layer = ttnn_moe.prepare(problem, experts, Placement.uniform(E, 4), backend="cuda")
        out = layer(hidden, routing.topk_ids, routing.topk_weights)
        want = _fp64(hidden, routing, experts)
        assert float(((out.double() - want).norm(dim=1) / want.norm(dim=1)).max()) < 1e-2
