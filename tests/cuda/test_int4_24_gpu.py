"""int4_24 experts on a GPU, with each family of the format, whatever the backend would choose; v6's bits.

`TTNN_MOE_CUDA_ARCH=sm_80` runs the same kernels from PTX.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import ttnn_moe
from assertions import assert_close
from cuda_gpus import no_host_sync
from cuda_layers import assert_same_bits, random_routing, replays
from int4_24_cases import exact_activations, exact_experts, integers, product
from one_family import only
from ttnn_moe import Experts, Placement, Problem, Routing
from ttnn_moe.backend import Numerics
from ttnn_moe.bench.layer import Layer, Weights
from ttnn_moe.cuda.arch import target_of
from ttnn_moe.cuda.moe.families import FAMILIES
from ttnn_moe.cuda.moe.family import Call, Family
from ttnn_moe.cuda.moe.int4_24_v6_steps import FusedMoE
from ttnn_moe.formats.int4_24 import NAME
from ttnn_moe.selfcheck.bounds import poisoned
from ttnn_moe.selfcheck.oracle import oracle

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CAPABILITY < (8, 0), reason="no GPU of compute capability 8.0 or newer is here"),
]
BF16 = torch.bfloat16


@pytest.fixture(params=[family for family in FAMILIES if family.weight_format == NAME], ids=lambda family: family.name)
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Family[Any]:
    wanted: Family[Any] = request.param

    only(wanted, request, monkeypatch)
    return wanted


def _experts(E: int, H: int, I: int, seed: int = 0, order: str = "halves") -> Experts:
    made = Weights.random(Layer("", E, 1, H, I, weight_format=NAME), "cuda", seed).experts
    return replace(made, gate_up_order=order)


def _want(
    family: Family[Any], hidden: Tensor, routing: Routing, experts: Experts, start: Tensor | None = None
) -> Tensor:
    numerics = Numerics(activation=BF16, expert_out=BF16 if family.rounds_expert_out else None)
    return oracle(hidden, routing.topk_ids, routing.topk_weights, experts, numerics, start)


def _hidden(T: int, H: int) -> Tensor:
    return torch.randn(T, H, device="cuda").bfloat16()


@pytest.mark.parametrize(
    ("E", "H", "I", "T", "K", "order", "odd"),
    [
        (4, 64, 64, 1, 1, "halves", False),
        (8, 2048, 768, 33, 8, "halves", True),
        (4, 192, 320, 50, 3, "interleaved", True),
        (4, 7168, 2048, 9, 2, "halves", False),
    ],
)
@pytest.mark.parametrize("eids", [True, False], ids=["Eids", "direct"])
def test_v6_has_the_bits_of_the_integer_model(
    E: int, H: int, I: int, T: int, K: int, order: str, odd: bool, eids: bool
) -> None:
    torch.manual_seed(T)
    experts = exact_experts(E, H, I, order, odd)
    there = Experts(NAME, E, H, I, {k: v.cuda() for k, v in experts.tensors.items()}, gate_up_order=order)
    flow = FusedMoE(there, T, K)
    ids = torch.randint(-1, E - 1, (T, K), dtype=torch.int32)
    parts = flow.permute(integers(T, H).cuda(), ids.cuda())
    chosen = parts.Eids if eids else None
    act = flow.k2(parts.X_perm, parts.OffE, chosen).cpu()
    X2 = integers(T * K, I)
    rows = flow.k4(X2.cuda(), parts.OffE, chosen).cpu()
    X, OffE = parts.X_perm.cpu(), parts.OffE.tolist()
    assert OffE == [int(((ids >= 0) & (ids < e)).sum()) for e in range(E + 1)]
    for e in range(E):
        at = slice(OffE[e], OffE[e + 1])
        assert torch.equal(act[at], exact_activations(experts, e, X[at]))
        assert torch.equal(rows[at], product(experts.tensors["w2"][e], X2[at]).bfloat16())


@pytest.mark.parametrize(
    ("T", "E", "K", "H", "I", "what"),
    [
        (1, 8, 2, 256, 128, "random"),
        (40, 8, 2, 192, 64, "random"),
        (300, 64, 4, 256, 192, "skewed"),
        (33, 8, 4, 128, 64, "absent"),
        (33, 8, 4, 128, 64, "one expert"),
        (19, 8, 4, 128, 320, "duplicates"),
        (19, 8, 2, 64, 64, "out of range"),
        (5, 4, 2, 7168, 2048, "random"),
        (24, 8, 2, 2048, 768, "random"),  # this and the rest: tiles of other sizes
        (60, 8, 2, 2048, 704, "random"),
        (130, 8, 2, 1984, 768, "random"),
        (200, 8, 2, 2048, 768, "skewed"),
        (700, 8, 2, 2048, 768, "random"),
    ],
)
def test_a_call_is_within_the_bound(T: int, E: int, K: int, H: int, I: int, what: str, family: Family[Any]) -> None:
    torch.manual_seed(T)
    routing = random_routing(T, E, K, 0.8 if what == "skewed" else 0.0)
    ids = routing.topk_ids
    if what == "absent":
        ids[torch.rand(T, K, device="cuda") < 0.5] = -1
        ids[3] = -1
    if what in ("one expert", "duplicates"):
        ids.fill_(E - 1)
    if what == "duplicates":
        ids[::2, 0] = 0
    if what == "out of range":
        ids[::2, 1], ids[1::3, 0] = E, -7
    for order in ("halves", "interleaved"):
        experts, hidden = _experts(E, H, I, T, order), _hidden(T, H)
        for ids64 in (False, True):
            given = Routing.from_topk(ids.long() if ids64 else ids, routing.topk_weights, E)
            for dtype, start in ((BF16, None), (torch.float32, torch.randn(T, H, device="cuda"))):
                out = poisoned(T, H, dtype=dtype, device="cuda") if start is None else start.clone()
                ttnn_moe.moe(hidden, given, experts, out=out, accumulate=start is not None, backend="cuda")
                assert_close(out, _want(family, hidden, given, experts, start), BF16, f"{order}, {dtype}")


def test_num_tokens_bounds_a_call(family: Family[Any]) -> None:
    T, n, E, H = 21, 9, 8, 128
    experts, hidden, routing = _experts(E, H, 64), _hidden(T, H), random_routing(T, E, 2)
    bound = torch.tensor(n, dtype=torch.int32, device="cuda")
    given = Routing.from_topk(routing.topk_ids, routing.topk_weights, E, num_tokens=bound)
    out = poisoned(T, H, dtype=BF16, device="cuda")
    ttnn_moe.moe(hidden, given, experts, out=out, backend="cuda")
    assert_close(out[:n], _want(family, hidden, routing, experts)[:n], BF16, "num_tokens")
    assert bool((out[n:] == 1e4).all())


def test_nan_of_a_token_stays_with_it(family: Family[Any]) -> None:
    T, E, H = 16, 2, 256
    experts, hidden, routing = _experts(E, H, 128), _hidden(T, H), random_routing(T, E, 2)
    want = _want(family, hidden, routing, experts)
    hidden[5] = float("nan")
    hidden[6, ::7] = float("inf")
    out = ttnn_moe.moe(hidden, routing, experts, backend="cuda")
    others = [t for t in range(T) if t not in (5, 6)]
    assert_close(out[others], want[others], BF16, "others")
    assert not out[5].isfinite().any() and not out[6].isfinite().all()


def test_a_graph_serves_every_routing(family: Family[Any]) -> None:
    experts = _experts(16, 256, 192)
    for hidden, routing, out in replays(experts, 300, 4, calls=3):
        assert_close(out, _want(family, hidden, routing, experts), BF16, "replay")


@pytest.mark.parametrize("T", [4, 700])
def test_twenty_repetitions_have_the_same_bits(T: int, family: Family[Any]) -> None:
    assert_same_bits(T, _experts(32, 256, 128))


def test_no_call_waits_for_the_gpu(family: Family[Any]) -> None:
    experts, hidden, routing = _experts(8, 128, 64), _hidden(9, 128), random_routing(9, 8, 2)
    flow = FusedMoE(experts, 9, 2)
    for refused in (False, True):  # the first call compiles
        with no_host_sync(refused):
            ttnn_moe.moe(hidden, routing, experts, backend="cuda")
            flow.apply(hidden, routing.topk_ids, routing.topk_weights)
            parts = flow.permute(hidden, routing.topk_ids)
            flow.combine(flow.k4(flow.k2(parts.X_perm, parts.OffE), parts.OffE), parts.Inv, routing.topk_weights)


def test_devices_of_a_mesh(family: Family[Any]) -> None:
    T, E, K, H = 40, 16, 4, 128
    experts, routing, hidden = _experts(E, H, 64), random_routing(T, E, K), _hidden(T, H)
    problem = Problem.of(T, K, experts, BF16, D=4)
    layer = ttnn_moe.prepare(problem, experts, Placement.uniform(E, 4), backend="cuda")
    out = layer(hidden, routing.topk_ids, routing.topk_weights)
    assert_close(out, _want(family, hidden, routing, experts), BF16, "mesh")


@pytest.mark.parametrize("seed", range(60))
def test_random_draw(seed: int, family: Family[Any]) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    E = rng.choice([1, 2, 7, 32, 128, 300])
    K = rng.randint(1, min(E, 16))
    T = rng.choice([1, 2, 4, 9, 60, 333, 1500])
    H, I = 64 * rng.randint(1, 16), 64 * rng.randint(1, 12)
    order = rng.choice(["halves", "interleaved"])
    routing = random_routing(T, E, K, rng.choice([0.0, 0.8]))
    experts, hidden = _experts(E, H, I, seed, order), _hidden(T, H)
    out = poisoned(T, H, dtype=BF16, device="cuda")
    ttnn_moe.moe(hidden, routing, experts, out=out, backend="cuda")
    assert_close(out, _want(family, hidden, routing, experts), BF16, f"T={T} E={E} K={K} H={H} I={I} {order}")


@pytest.mark.parametrize(("T", "E"), [(0, 128), (1, 256), (8, 128), (8, 256), (64, 256)])
def test_the_sizes_of_deepseek_v3(T: int, E: int, family: Family[Any]) -> None:
    K, H, I = 8, 7168, 2048
    experts, routing, hidden = _experts(E, H, I), random_routing(T, E, K), _hidden(T, H)
    out = ttnn_moe.moe(hidden, routing, experts, backend="cuda")
    assert_close(out, _want(family, hidden, routing, experts), BF16, f"T={T}, E={E}")


@pytest.mark.parametrize("order", ["halves", "interleaved"])
@pytest.mark.parametrize(("T", "E", "K"), [(1, 16, 4), (6, 16, 2), (40, 16, 4), (100, 8, 2), (400, 8, 2)])
def test_the_families_agree_up_to_the_order_of_sums(T: int, E: int, K: int, order: str) -> None:
    """Each tile size of the fast kernels, beside v6: roundings to bf16 alone may differ."""
    torch.manual_seed(T)
    experts, routing, hidden = _experts(E, 2048, 768, order=order), random_routing(T, E, K, 0.0), _hidden(T, 2048)
    target, outs = target_of(hidden.device), []
    problem = Problem.of(T, K, experts, BF16)
    for family in FAMILIES:
        if family.weight_format == NAME and family.why_not(problem, target) is None:
            plan, out = family.plan(problem, target), torch.empty_like(hidden)
            buffers = tuple(torch.empty(b.shape, dtype=b.dtype, device="cuda") for b in family.scratch(plan))
            family.launch(plan, Call(hidden, routing, experts, out, False), buffers)
            outs.append(out.double())
    *fast, v6 = outs
    assert fast
    for out in fast:
        assert float((out - v6).norm() / v6.norm()) < 4e-3
