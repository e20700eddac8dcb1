"""The CUDA C++ kernels, every plan of them, whatever the backend would choose.

Those of sm_80 run on a newer GPU too, from PTX: `pytest -k sm80`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ttnn_moe
from assertions import assert_close
from cuda_gpus import gpu_of
from cuda_layers import assert_same_bits, random_experts, random_routing, replays
from ttnn_moe import Experts, Placement, Problem, Routing
from ttnn_moe.backend import Numerics
from ttnn_moe.cuda import arch as arches
from ttnn_moe.cuda.arch import ARCHES, HOPPER, Arch, Target
from ttnn_moe.cuda.device import H200
from ttnn_moe.cuda.moe import prepared, run
from ttnn_moe.cuda.moe.cuda_cpp import CudaCpp, dense_limits
from ttnn_moe.cuda.moe.families import CUDA_CPP, Chosen
from ttnn_moe.cuda.moe.few import FEW, FewPlan, FewSizes
from ttnn_moe.cuda.moe.sm80 import SM80, WarpTile
from ttnn_moe.cuda.moe.sm90 import SM90, MlpTile
from ttnn_moe.cuda.moe.sort import Sorters
from ttnn_moe.cuda.moe.sorted import SortedPlan
from ttnn_moe.selfcheck.bounds import poisoned
from ttnn_moe.selfcheck.edges import CASES, Case
from ttnn_moe.selfcheck.oracle import oracle

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


@dataclass(frozen=True)
class Form:
    """A family with sizes that it might not choose itself."""

    family: CudaCpp[Any]
    arch: Arch
    plan: Callable[[Problem], Any]


def _few(arch: Arch) -> Form:
    return Form(FEW, arch, lambda problem: FewPlan(problem, arch, FewSizes()))


def _sorted(tile: MlpTile | WarpTile, sorters: Sorters) -> Form:
    hopper = isinstance(tile, MlpTile)
    arch = HOPPER if hopper else _sm80()
    return Form(SM90 if hopper else SM80, arch, lambda problem: SortedPlan(problem, arch, tile, sorters))


FORMS = {
    "few": _few(HOPPER),
    "n64": _sorted(MlpTile(64, 9, 128, read_once=True), Sorters(128, 8)),
    "n32": _sorted(MlpTile(32, 10, 128, read_once=True), Sorters(256, 1)),
    "n176": _sorted(MlpTile(176, 3), Sorters(512, 8)),
    "n160": _sorted(MlpTile(160, 4), Sorters(1024, 8)),
    "sm80_few": _few(_sm80()),
    "sm80_n32": _sorted(WarpTile(1, 2, 32, 6, blocks=2, read_once=True), Sorters(128)),
    "sm80_n64": _sorted(WarpTile(2, 2, 64, 4), Sorters(512, parts=3)),
    "sm80_n128": _sorted(WarpTile(4, 2, 128, 4, k_block=32), Sorters(1024)),
    "sm80_n160": _sorted(WarpTile(4, 2, 160, 3), Sorters(1024, parts=4)),
}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Form:
    wanted = FORMS[request.param]
    if wanted.arch == HOPPER and CAPABILITY != (9, 0):
        pytest.skip("no GPU of compute capability 9.0 is here")

    def choose(problem: Problem, target: Target, *, aligned: bool) -> Chosen:
        plan = wanted.plan(problem)
        return Chosen(wanted.family, plan, wanted.family.scratch(plan), {})

    def most_bytes(problem: Problem, target: Target) -> int:
        return max(most(problem, target), prepared.bytes_of(wanted.family.scratch(wanted.plan(problem))))

    most = prepared.most_bytes
    monkeypatch.setattr(prepared, "most_bytes", most_bytes)
    monkeypatch.setattr(run, "choose", choose)
    run.chosen_of.cache_clear()
    request.addfinalizer(run.chosen_of.cache_clear)
    return wanted


@pytest.fixture
def asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The architecture that TTNN_MOE_CUDA_ARCH asks for."""
    monkeypatch.setenv(arches.ENV, request.param)
    run.chosen_of.cache_clear()
    request.addfinalizer(run.chosen_of.cache_clear)
    return request.param


def _numerics(form: Form, dtype: torch.dtype) -> Numerics:
    return Numerics(activation=dtype, expert_out=dtype if form.family.rounds_expert_out else None)


def _serves(case: Case) -> bool:
    return dense_limits(Problem(case.T, case.E, case.K, case.H, case.I), Target(H200, HOPPER)) is None


@given(st.integers(0, 1 << 18), st.integers(1, 1024), st.integers(1, 16), st.sampled_from(sorted(ARCHES)))
def test_every_plan_fits(T: int, E: int, K: int, capability: tuple[int, int]) -> None:
    arch, problem = ARCHES[capability], Problem(T, E, K, 64, 64)
    target = Target(gpu_of(capability), arch)
    able = [family for family in CUDA_CPP if family.why_not(problem, target) is None]
    if not able:
        assert arch.shared_memory == 99 << 10 and E > 743
        return
    assert able[-1].name == arch.products
    for family in able:
        plan, again = family.plan(problem, target), family.plan(problem, target)
        assert plan.arch == arch
        uses = family.uses(plan, ids64=True, add=False)
        assert uses == family.uses(again, ids64=True, add=False)
        assert all(use.shared_memory <= arch.shared_memory for use in uses)
    plan = able[-1].plan(problem, target)
    tile, threads = plan.tile, plan.sorters.threads
    assert E <= threads <= 1024 and threads % 32 == 0
    if arch is HOPPER:
        assert isinstance(tile, MlpTile) and tile.max_n % 16 == 0 and tile.max_n <= 192
    else:
        assert isinstance(tile, WarpTile) and tile.max_n % (16 * tile.warps_n) == 0 and 2 <= tile.stages < 15
        assert plan.sorters.cluster == 1


def test_tiles_of_sm80_grow_with_rows_per_expert() -> None:
    for capability, rows in (((8, 0), [32, 64, 96, 160, 160]), ((8, 6), [32, 64, 96, 128, 128])):
        target = Target(gpu_of(capability), ARCHES[capability])
        tiles = [SM80.plan(Problem(T, 128, 8, 64, 64), target).tile for T in (64, 512, 1024, 2048, 4096)]
        assert [tile.max_n for tile in tiles] == rows and [tile.read_once for tile in tiles] == [True] * 4 + [False]


def test_why_not() -> None:
    def why_not(arch: Arch = HOPPER, **change: Any) -> str | None:
        sizes = {"T": 9, "E": 128, "K": 8, "H": 2048, "I": 768} | change
        family = SM90 if arch is HOPPER else SM80
        return family.why_not(Problem(**sizes), Target(H200, arch))

    assert why_not() is None
    assert why_not(ARCHES[8, 6]) is None
    assert why_not(ARCHES[8, 0], E=1024) is None
    assert why_not(T=(1 << 22) - 1, K=8, I=1024) is None
    for reason, words in [
        (why_not(ARCHES[8, 6], E=1024), "sm_86 has: 99 KiB"),
        (why_not(dtype=torch.float32), "bf16 and fp16"),
        (why_not(weight_format="int4"), "dense weights, not 'int4'"),
        (why_not(H=2080), "multiples of 64, not 2080 and 768"),
        (why_not(K=17), "K up to 16"),
        (why_not(E=1025), "1024 experts"),
        (why_not(T=1 << 22, K=8, I=1024), "2^35"),
        (SM80.why_not(Problem(9, 8, 2, 64, 64), Target(H200, HOPPER)), "not sm_90a"),
        (SM90.why_not(Problem(9, 8, 2, 64, 64), Target(H200, ARCHES[8, 0])), "not sm_80"),
        (FEW.why_not(Problem(4, 128, 8, 64, 64), Target(H200, HOPPER)), "up to 24 pairs"),
        (FEW.why_not(Problem(2, 8, 2, 64, 64), Target(H200, HOPPER)), "E / 3 = 2 pairs"),
    ]:
        assert reason is not None and words in reason


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", [case for case in CASES if _serves(case)], ids=str)
class TestCases:
    pytestmark = on_gpu

    def test_case(self, case: Case, dtype: torch.dtype, form: Form) -> None:
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
                if start is not None and (bound is not None or not case.accumulates):
                    continue
                out = poisoned(case.T, case.H, dtype=kind, device="cuda")
                if start is not None:
                    out.copy_(start)
                ttnn_moe.moe(
                    there.hidden, routing, there.experts, out=out, accumulate=start is not None, backend="cuda"
                )
                want = oracle(x.hidden, ids, x.weights, x.experts, _numerics(form, dtype), start)
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
        kinds = torch.bfloat16, torch.bfloat16, "dense", "halves", "silu", False, True, torch.device("cuda", 0)
        chosen = run.chosen_of(100, 4, 32, 1, 128, 128, *kinds, True)
        assert chosen.family is SM80 and chosen.plan.arch.name == asked.replace("sm_", "compute_")
        _draw(1000 + seed)

    @pytest.mark.parametrize("T", [4, 700, 5000])
    def test_twenty_repetitions_have_the_same_bits(self, form: Form, T: int) -> None:
        if form.family is FEW and T > 100:
            pytest.skip("many tokens, few-token kernels")
        assert_same_bits(T)

    def test_more_tokens_than_a_grid_is_high(self) -> None:
        T, E = 70_000, 4
        experts, routing = random_experts(E, 64, 64), random_routing(T, E, 1)
        hidden = torch.randn(T, 64, device="cuda").bfloat16()
        out = ttnn_moe.moe(hidden, routing, experts, backend="cuda")
        want = _fp64(hidden, routing, experts)
        assert float(((out.double() - want).norm(dim=1) / want.norm(dim=1).median()).max()) < 2e-2

    def test_a_graph_serves_every_routing(self, form: Form) -> None:
        experts = random_experts(16, 256, 192)
        for hidden, routing, out in replays(experts, 300, 4, calls=3):
            want = _fp64(hidden, routing, experts)
            assert float((out.double() - want).norm(dim=1).max()) <= 1e-2 * float(want.norm(dim=1).median() + 1e-9)

    def test_weights_are_freed_with_their_tensors(self, form: Form) -> None:
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

    def test_devices_of_a_mesh(self, form: Form) -> None:
        T, E, K, H, I = 40, 16, 4, 128, 64
        experts, routing = random_experts(E, H, I), random_routing(T, E, K)
        hidden = torch.randn(T, H, device="cuda").bfloat16()
        problem = Problem.of(T, K, experts, torch.bfloat16, D=4)
        layer = ttnn_moe.prepare(problem, experts, Placement.uniform(E, 4), backend="cuda")
        out = layer(hidden, routing.topk_ids, routing.topk_weights)
        want = _fp64(hidden, routing, experts)
        assert float(((out.double() - want).norm(dim=1) / want.norm(dim=1)).max()) < 1e-2
