"""MXFP4 experts on a GPU, with each family of the format that runs there, whatever the backend would choose.

`TTNN_MOE_CUDA_ARCH=sm_80` runs the kernels of sm_80 from PTX. `-k NAME-` takes one family.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import ttnn_moe
from assertions import assert_close
from cuda_gpus import no_host_sync, runs_hopper_code
from cuda_layers import assert_same_bits, random_routing, replays
from mxfp4_cases import CALLS, GPT_OSS, Case, Form, check_case, inputs_of, near_the_ends, random_case, random_mxfp4
from one_family import only
from ttnn_moe import Experts, Placement, Problem, Routing
from ttnn_moe.arranging import arranged
from ttnn_moe.backend import Numerics
from ttnn_moe.cuda.arch import target_of
from ttnn_moe.cuda.moe.families import FAMILIES
from ttnn_moe.cuda.moe.family import Family, numerics_of
from ttnn_moe.formats.mxfp4 import NAME
from ttnn_moe.formats.mxfp4_boxes import NAME as BOXES
from ttnn_moe.selfcheck.bounds import poisoned
from ttnn_moe.selfcheck.oracle import oracle

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CAPABILITY < (8, 0), reason="no GPU of compute capability 8.0 or newer is here"),
]
BF16 = torch.bfloat16


@pytest.fixture(params=[f for f in FAMILIES if f.weight_format in (NAME, BOXES)], ids=lambda family: f"{family.name}-")
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Family[Any]:
    wanted: Family[Any] = request.param

    if wanted.weight_format == BOXES and not runs_hopper_code():
        pytest.skip("arranged experts run on Hopper alone")
    only(wanted, request, monkeypatch)
    if wanted.weight_format == BOXES:
        _arrange_experts(monkeypatch)
    return wanted


def _arrange_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls and layers take arranged copies of their experts."""
    moe, prepare = ttnn_moe.moe, ttnn_moe.prepare
    kept: dict[int, tuple[Experts, Experts]] = {}

    def boxes(experts: Experts) -> Experts:
        if id(experts) not in kept:
            kept[id(experts)] = experts, arranged(experts)
        return kept[id(experts)][1]

    def arranged_moe(hidden: Tensor, routing: Routing, experts: Experts, **options: Any) -> Tensor:
        return moe(hidden, routing, boxes(experts), **options)

    def arranged_prepare(problem: Problem, experts: Experts, *args: Any, **options: Any) -> Any:
        return prepare(replace(problem, weight_format=BOXES), boxes(experts), *args, **options)

    monkeypatch.setattr(ttnn_moe, "moe", arranged_moe)
    monkeypatch.setattr(ttnn_moe, "prepare", arranged_prepare)


def _numerics(family: Family[Any]) -> Numerics:
    return numerics_of(family, Problem(1, 1, 1, 32, 32))


def _want(family: Family[Any], hidden: Tensor, routing: Routing, experts: Experts) -> Tensor:
    return oracle(hidden, routing.topk_ids, routing.topk_weights, experts, _numerics(family))


@pytest.mark.parametrize(("case", "form"), CALLS, ids=str)
def test_a_call_is_within_the_bound(case: Case, form: Form, family: Family[Any]) -> None:
    check_case(case, form, _numerics(family))


@pytest.mark.parametrize("rows", [6, 20, 32, 50, 70])
@pytest.mark.parametrize("form", [Form(), GPT_OSS], ids=str)
def test_tiles_of_every_size_are_within_the_bound(rows: int, form: Form, family: Family[Any]) -> None:
    """rows: an expert's, on average."""
    check_case(Case(4 * rows, 8, 2, 2880, 288), form, _numerics(family))


WIDE = (
    Case(60, 2, 1, 7168, 256),
    Case(40, 2, 1, 256, 16384),
    Case(100, 2, 1, 16384, 256),
    Case(64, 2, 1, 2048, 20704),
    Case(128, 2, 1, 20704, 256, "one expert"),
)


@pytest.mark.parametrize("form", [Form(), GPT_OSS], ids=str)
@pytest.mark.parametrize("case", WIDE, ids=str)
def test_a_wide_layer_is_within_the_bound(case: Case, form: Form, family: Family[Any]) -> None:
    """Its scales leave little shared memory, so mxfp4_sm90 narrows its tiles: see test_mxfp4_sm90_plan.py."""
    check_case(case, form, _numerics(family))


@pytest.mark.parametrize("seed", range(40))
def test_random_draw(seed: int, family: Family[Any]) -> None:
    case, form = random_case(seed)
    check_case(case, form, _numerics(family))


@pytest.mark.parametrize("high", [False, True])
@pytest.mark.parametrize("order", ["halves", "interleaved"])
def test_scales_near_the_ends(order: str, high: bool, family: Family[Any]) -> None:
    experts, hidden = near_the_ends(Form(order=order), high)
    for T in (1, 9):
        routing = Case(T, 4, 2, 96, 64).routing("cuda")
        out = ttnn_moe.moe(hidden[:T], routing, experts, backend="cuda")
        assert_close(out, _want(family, hidden[:T], routing, experts), BF16, f"T={T}")


@pytest.mark.parametrize("form", [Form(), GPT_OSS], ids=str)
@pytest.mark.parametrize("T", [4, 40])
def test_nan_of_a_token_stays_with_it(T: int, form: Form, family: Family[Any]) -> None:
    """NaN passes the clamp, too."""
    hidden, routing, experts = inputs_of(Case(T, 12, 2, 96, 128), form)
    want = _want(family, hidden, routing, experts)
    hidden[1] = float("nan")
    hidden[2, ::7] = float("inf")
    out = ttnn_moe.moe(hidden, routing, experts, backend="cuda")
    others = [t for t in range(T) if t not in (1, 2)]
    assert_close(out[others], want[others], BF16, "others")
    assert not out[1].isfinite().any() and not out[2].isfinite().all()


@pytest.mark.parametrize("T", [5, 21])
def test_num_tokens_bounds_a_call(T: int, family: Family[Any]) -> None:
    n = T // 2
    hidden, routing, experts = inputs_of(Case(T, 16, 2, 160, 96), GPT_OSS)
    want = _want(family, hidden[:n], Routing.from_topk(routing.topk_ids[:n], routing.topk_weights[:n], 16), experts)
    hidden[n:] = float("nan")
    routing.topk_ids[n:] = 10**6
    bound = torch.tensor(n, dtype=torch.int32, device="cuda")
    given = Routing.from_topk(routing.topk_ids, routing.topk_weights, 16, num_tokens=bound)
    out = poisoned(T, 160, dtype=BF16, device="cuda")
    ttnn_moe.moe(hidden, given, experts, out=out, backend="cuda")
    assert_close(out[:n], want, BF16, "num_tokens")
    assert bool((out[n:] == 1e4).all())


@pytest.mark.parametrize("T", [4, 300])
def test_a_graph_serves_every_routing(T: int, family: Family[Any]) -> None:
    experts = random_mxfp4(16, 288, 192, GPT_OSS)
    for hidden, routing, out in replays(experts, T, 4, calls=3):
        assert_close(out, _want(family, hidden, routing, experts), BF16, "replay")


@pytest.mark.parametrize("form", [Form(), GPT_OSS], ids=str)
@pytest.mark.parametrize("T", [1, 40, 700])
def test_twenty_repetitions_have_the_same_bits(T: int, form: Form, family: Family[Any]) -> None:
    assert_same_bits(T, random_mxfp4(32, 256, 160, form))


@pytest.mark.parametrize("T", [4, 40, 512, 4096])
def test_a_long_layer_has_the_same_bits(T: int, family: Family[Any]) -> None:
    """A block makes dozens of items, with a down product whose last rows are a quarter of a block. Each sum has dozens
    of stages, whose order may not depend on the items that a block had before."""
    assert_same_bits(T, random_mxfp4(64, 2880, 1440, GPT_OSS))


@pytest.mark.parametrize("T", [1, 9, 200])
def test_no_call_waits_for_the_gpu(T: int, family: Family[Any]) -> None:
    hidden, routing, experts = inputs_of(Case(T, 32, 2, 128, 64), GPT_OSS)
    for refused in (False, True):  # the first call compiles
        with no_host_sync(refused):
            ttnn_moe.moe(hidden, routing, experts, backend="cuda")


@pytest.mark.parametrize("T", [2, 40])
def test_devices_of_a_mesh(T: int, family: Family[Any]) -> None:
    E, K, H = 16, 4, 128
    experts, routing = random_mxfp4(E, H, 96, GPT_OSS), random_routing(T, E, K)
    hidden = torch.randn(T, H, device="cuda").bfloat16()
    problem = Problem.of(T, K, experts, BF16, D=4)
    layer = ttnn_moe.prepare(problem, experts, Placement.uniform(E, 4), backend="cuda")
    out = layer(hidden, routing.topk_ids, routing.topk_weights)
    assert_close(out, _want(family, hidden, routing, experts), BF16, "mesh")


@pytest.mark.parametrize("change", [{"H": 48}, {"I": 40}, {"weight_format": "dense"}], ids=str)
def test_what_it_does_not_run_is_refused_in_words(change: dict[str, Any], family: Family[Any]) -> None:
    problem = Problem(1, 32, 4, 64, 64, weight_format=NAME, device="cuda")
    assert family.why_not(replace(problem, **change), target_of())
