"""The MXFP4 kernels of compute capability 12.x on a GPU without their instructions: software atoms, every tile."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

import ttnn_moe
from assertions import assert_close
from cuda_gpus import no_host_sync, not_hopper
from cuda_layers import assert_same_bits, random_routing, replays
from mxfp4_cases import CASES as MXFP4_CASES
from mxfp4_cases import GPT_OSS, check_case
from sm120_cases import BF16, ROUTINGS, Sm120Case, experts_of, packed, worst
from ttnn_moe import Experts, Problem, Routing
from ttnn_moe.cuda import backend
from ttnn_moe.cuda.arch import Target, target_of
from ttnn_moe.cuda.moe import prepared, run
from ttnn_moe.cuda.moe.families import Chosen
from ttnn_moe.cuda.moe.family import numerics_of
from ttnn_moe.cuda.moe.mxfp4_tiles import TILES, Tile
from ttnn_moe.cuda.moe.sm120_mxfp4 import SM120_MXFP4, Sm120Mxfp4
from ttnn_moe.selfcheck.bounds import BOUND
from ttnn_moe.selfcheck.edges import CASES as CONTRACT
from ttnn_moe.selfcheck.edges import Case, Inputs
from ttnn_moe.selfcheck.formats import case_in, experts_in
from ttnn_moe.selfcheck.oracle import oracle

pytestmark = [pytest.mark.gpu, not_hopper]  # cvt to e4m3
FP4 = [packed(Tile(*size)) for size in ((8, 64), (16, 128), (64, 128), (128, 128), (256, 64), (128, 16))]
CASES = [
    *(Sm120Case(61, 4, 256, 192, 8, what) for what in ROUTINGS),
    Sm120Case(1, 4, 128, 64, 8),
    Sm120Case(600, 1, 128, 96, 3, "one expert"),
    Sm120Case(300, 2, 96, 160, 6, "skewed", "interleaved", add=True),
    Sm120Case(21, 2, 160, 96, 8, bound=9),
    Sm120Case(130, 4, 2048, 768, 8),
    Sm120Case(64, 8, 128, 96, 128, "skewed"),
]
LIKE_GPT_OSS = [
    Sm120Case(33, 4, 2880, 2880, 8, order="interleaved", bias=BF16),
    Sm120Case(70, 2, 96, 160, 6, "skewed", bias=torch.float32, add=True),
]


@pytest.mark.parametrize("tile", [*TILES, *FP4], ids=str)
def test_every_case_is_within_the_bound(tile: Tile) -> None:
    for case in CASES:
        assert worst(case, tile, target_of().arch, "cuda") <= BOUND[BF16], case  # type: ignore[arg-type]


@pytest.mark.parametrize("tile", [Tile(8, 64), Tile(64, 16), Tile(128, 128), Tile(256, 64)], ids=str)
def test_gpt_oss_is_within_the_bound(tile: Tile) -> None:
    for case in LIKE_GPT_OSS:
        assert worst(case, tile, target_of().arch, "cuda") <= BOUND[BF16], case  # type: ignore[arg-type]


def _use(tile: Tile, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sm120Mxfp4:
    """Every call takes this tile."""
    wanted = Sm120Mxfp4(tile.packed, software=True)

    def choose(problem: Problem, target: Target, **_: Any) -> Chosen:
        assert target.arch is not None
        plan = wanted.plan_of(problem, target.arch, tile)
        return Chosen(wanted, plan, wanted.scratch(plan), {})

    def most_bytes(problem: Problem, target: Target) -> int:
        return prepared.bytes_of(choose(problem, target).scratch)

    monkeypatch.setattr(prepared, "most_bytes", most_bytes)
    for module in (run, backend):
        monkeypatch.setattr(module, "choose", choose)
    run.chosen_of.cache_clear()
    request.addfinalizer(run.chosen_of.cache_clear)
    return wanted


@pytest.fixture(params=[Tile(8, 64), Tile(64, 16), Tile(128, 128), packed(Tile(64, 128))], ids=str)
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sm120Mxfp4:
    return _use(request.param, request, monkeypatch)


@cache
def _edges() -> list[tuple[Case, Inputs, Tensor]]:
    """The contract's cases in MXFP4, and what is right of tokens that are not spoiled: whatever the tile."""
    made = []
    for case in map(partial(case_in, "mxfp4"), CONTRACT):
        x = case.make(BF16)
        x = replace(x, experts=experts_in("mxfp4", x.experts)).to("cuda")
        numerics = numerics_of(SM120_MXFP4, x.problem)
        made.append((case, x, oracle(x.hidden, x.counted_ids, x.weights, x.experts, numerics)))
    return made


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_the_edges_of_the_contract(tile: Tile, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    _use(tile, request, monkeypatch)
    for case, x, want in _edges():
        n = case.T if x.num_tokens is None else x.num_tokens
        out = ttnn_moe.moe(x.hidden, x.routing(), x.experts, backend="cuda")
        good = [t for t in range(n) if t not in x.spoiled]
        assert_close(out[good], want[good], BF16, str(case))
        assert not any(out[t].isfinite().all() for t in x.spoiled), case


def test_the_cases_of_gpt_oss(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    numerics = numerics_of(_use(Tile(8, 128), request, monkeypatch), Problem(1, 1, 1, 32, 32))
    for case in MXFP4_CASES:
        check_case(case, GPT_OSS, numerics)


def _experts(E: int, H: int, I: int) -> Experts:
    return experts_of(E, H, I, device="cuda")


def test_a_graph_serves_every_routing(family: Sm120Mxfp4) -> None:
    experts = _experts(16, 256, 192)
    for hidden, routing, out in replays(experts, 100, 4, calls=3):
        numerics = numerics_of(family, Problem.of(100, 4, experts, BF16))
        want = oracle(hidden, routing.topk_ids, routing.topk_weights, experts, numerics)
        assert_close(out, want, BF16, "replay")


@pytest.mark.parametrize("T", [4, 300])
def test_twenty_repetitions_have_the_same_bits(T: int, family: Sm120Mxfp4) -> None:
    assert_same_bits(T, _experts(32, 256, 128))


def test_no_call_waits_for_the_gpu(family: Sm120Mxfp4) -> None:
    experts, hidden, routing = _experts(8, 128, 64), torch.randn(9, 128).bfloat16().cuda(), random_routing(9, 8, 2)
    for refused in (False, True):  # the first call compiles
        with no_host_sync(refused):
            ttnn_moe.moe(hidden, routing, experts, backend="cuda")


def test_nan_of_a_token_stays_with_it(family: Sm120Mxfp4) -> None:
    T, H, experts = 16, 256, _experts(2, 256, 128)
    hidden, routing = torch.randn(T, H).bfloat16().cuda(), random_routing(T, 2, 2)
    numerics = numerics_of(family, Problem.of(T, 2, experts, BF16))
    want = oracle(hidden, routing.topk_ids, routing.topk_weights, experts, numerics)
    hidden[5] = float("nan")
    hidden[6, ::7] = float("inf")
    out = ttnn_moe.moe(hidden, routing, experts, backend="cuda")
    others = [t for t in range(T) if t not in (5, 6)]
    assert_close(out[others], want[others], BF16, "others")
    assert not out[5].isfinite().any() and not out[6].isfinite().all()


def test_int64_ids_and_a_part_of_the_experts(family: Sm120Mxfp4) -> None:
    experts, hidden, routing = _experts(8, 128, 64), torch.randn(40, 128).bfloat16().cuda(), random_routing(40, 8, 2)
    given = Routing.from_topk(routing.topk_ids.long(), routing.topk_weights, 8)
    numerics = numerics_of(family, Problem.of(40, 2, experts, BF16))
    want = oracle(hidden, routing.topk_ids, routing.topk_weights, experts, numerics)
    assert_close(ttnn_moe.moe(hidden, given, experts, backend="cuda"), want, BF16, "int64")
    problem = replace(Problem.of(40, 2, experts, BF16), D=4)
    layer = ttnn_moe.prepare(problem, experts, ttnn_moe.Placement.uniform(8, 4), backend="cuda")
    assert_close(layer(hidden, routing.topk_ids, routing.topk_weights), want, BF16, "mesh")
