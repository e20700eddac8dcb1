"""The benchmark's arithmetic: floors, draws, the gate, spreads, what fits a memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ttnn_moe import Experts, Routing, moe
from ttnn_moe.bench.draw import Draw
from ttnn_moe.bench.floor import Ceilings, bytes_moved, floor, flops, measure_ceilings
from ttnn_moe.bench.gate import POISON, Inputs, check_calls, check_replay, checked_tokens, judge, rounded
from ttnn_moe.bench.implementations import ours
from ttnn_moe.bench.layer import PRESETS, Layer, Weights, fit, free_bytes
from ttnn_moe.bench.measure import Options, Point, draws_of
from ttnn_moe.bench.timing import CpuClock, Spread, Turn, take_turns
from ttnn_moe.errors import ContractError, RequestError
from ttnn_moe.selfcheck.oracle import oracle

SMALL = Layer("small", E=12, K=3, H=64, I=32, dtype=torch.float32)


def test_the_floor_counts_the_draws_own_experts_and_pairs() -> None:
    layer = Layer("layer", E=4, K=2, H=10, I=6)
    ids = torch.tensor([[0, 2], [2, -1], [2, 0]], dtype=torch.int32)
    draw = Draw.of(ids, torch.ones(3, 2), layer.E)
    assert (draw.active, draw.most, draw.pairs) == (2, 3, 5)
    weights, activations = 2 * (3 * 10 * 6) * 2, 2 * 3 * 10 * 2
    assert bytes_moved(layer, draw) == weights + activations
    assert flops(layer, draw) == 5 * 2 * (3 * 10 * 6)
    found = floor(layer, draw, Ceilings(read_bytes_per_s=1e6, flops_per_s=1e6))
    assert found.bytes_us == weights + activations and found.flops_us == found.us == 1800
    assert floor(layer, draw, Ceilings(1e3, 1e9)).us == found.bytes_us * 1e3


@pytest.mark.parametrize(("preset", "T", "microseconds"), [("qwen3-30b-a3b", 1, 17.6), ("qwen3-30b-a3b", 16384, 1566)])
def test_the_floor_of_a_real_layer(preset: str, T: int, microseconds: float) -> None:
    layer = PRESETS[preset]
    found = floor(layer, Draw.random(T, layer.E, layer.K, seed=0), Ceilings(4.3e12, 790e12))
    assert found.us == pytest.approx(microseconds, rel=0.01)


def test_ceilings_of_this_machine_are_positive_and_finite() -> None:
    found = measure_ceilings("cpu", torch.float32)
    assert 1e8 < found.read_bytes_per_s < 1e13 and 1e8 < found.flops_per_s < 1e14


@pytest.mark.parametrize("skewed", [False, True])
def test_a_draw_names_distinct_experts_and_is_the_same_again(skewed: bool) -> None:
    draw = Draw.random(500, 16, 5, seed=3, skewed=skewed)
    ids = draw.ids.long()
    assert draw.ids.dtype == torch.int32 and draw.weights.dtype == torch.float32
    assert int(ids.min()) >= 0 and int(ids.max()) < 16
    assert all(len(set(row)) == 5 for row in ids.tolist())
    torch.testing.assert_close(draw.weights.sum(1), torch.ones(500))
    assert float(draw.weights.min()) > 0.5 / (5 * 1.5)
    counts = ids.flatten().bincount(minlength=16)
    assert (draw.active, draw.most, draw.pairs) == (int((counts > 0).sum()), int(counts.max()), 2500)
    again, other = (Draw.random(500, 16, 5, seed, skewed) for seed in (3, 4))
    assert torch.equal(again.ids, draw.ids) and torch.equal(again.weights, draw.weights)
    assert not torch.equal(other.ids, draw.ids)


def test_a_skewed_draw_has_a_busy_expert_and_a_uniform_one_has_none() -> None:
    mean = 4096 * 8 / 128
    uniform, skewed = (Draw.random(4096, 128, 8, seed=0, skewed=s).most / mean for s in (False, True))
    assert uniform < 1.3 and 3.5 < skewed < 7


def test_one_token_draws_as_many_experts_as_it_may() -> None:
    assert Draw.random(1, 4, 4, seed=0).active == 4


@pytest.mark.parametrize("seed", range(4))
def test_a_draw_beside_others_is_the_same_routing_of_other_experts(seed: int) -> None:
    draw, taken = Draw.random(3, 24, 4, seed), torch.zeros(24, dtype=torch.bool)
    taken[Draw.random(3, 24, 4, seed + 9).ids.long()] = True
    found = draw.beside(taken)
    assert not bool(taken[found.ids.long()].any()) and torch.equal(found.weights, draw.weights)
    same = draw.ids.flatten()[:, None] == draw.ids.flatten()
    assert torch.equal(found.ids.flatten()[:, None] == found.ids.flatten(), same)
    again = Draw.of(found.ids, found.weights, 24)
    assert (again.active, again.most, again.pairs) == (draw.active, draw.most, draw.pairs)


@pytest.mark.parametrize(("T", "calls"), [(1, 48), (2, 32), (4, 16), (5, 4), (4096, 4)])
def test_calls_of_few_tokens_read_experts_of_their_own(T: int, calls: int) -> None:
    layer = replace(SMALL, E=128, K=8)
    drawn = draws_of(layer, Point(T), 4, Options("cuda"))
    assert len(drawn) == calls
    for first in range(4):
        used = [set(draw.ids.flatten().tolist()) for draw in drawn[first::4]]
        assert len(set.union(*used)) == sum(map(len, used))
    assert len(draws_of(layer, Point(T), 2, Options("cpu"))) == 2


def inputs_and_right_outputs(layer: Layer = SMALL, T: int = 9, sets: int = 2) -> tuple[list[Inputs], list[Tensor]]:
    """Weight sets' inputs, and outputs that an independent loop computed."""
    inputs, outputs = [], []
    for s in range(sets):
        weights, draw = Weights.random(layer, "cpu", seed=s), Draw.random(T, layer.E, layer.K, seed=s)
        hidden = torch.randn(T, layer.H).to(layer.dtype)
        inputs.append(Inputs.of(layer, hidden, draw, weights))
        out = torch.zeros(T, layer.H, dtype=torch.float64)
        for t in range(T):
            for e, w in zip(draw.ids[t].tolist(), draw.weights[t].tolist(), strict=True):
                gate_up = weights.gate_up[e].double() @ hidden[t].double()
                act = torch.nn.functional.silu(gate_up[: layer.I]) * gate_up[layer.I :]
                out[t] += w * (weights.down[e].double() @ act)
        outputs.append(out.to(layer.dtype))
    return inputs, outputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gate_passes_what_is_right(dtype: torch.dtype) -> None:
    inputs, outputs = inputs_and_right_outputs(replace(SMALL, dtype=dtype))
    verdict = judge(outputs, inputs)
    assert verdict.wrong is None and 0 < verdict.error < {2: 5e-3, 4: 1e-6}[dtype.itemsize]


def test_declared_roundings_decide_where_they_weigh_more_than_the_bound() -> None:
    layer = Layer("tiny", E=8, K=2, H=8, I=1)
    reference, generator = ours("cpu", "reference")[0], torch.Generator().manual_seed(0)
    sets, inputs = [Weights.random(layer, "cpu", seed) for seed in range(16)], []
    for seed, weights in enumerate(sets):
        hidden = torch.randn(64, layer.H, generator=generator).bfloat16()
        inputs.append(Inputs.of(layer, hidden, Draw.random(64, layer.E, layer.K, seed), weights))
    outputs = [
        moe(one.hidden, Routing.from_topk(one.ids, one.weights, layer.E), weights.experts, backend="reference")
        for one, weights in zip(inputs, sets, strict=True)
    ]
    assert judge(outputs, inputs).wrong is not None, "the roundings cost more than the bound"
    declared = rounded(inputs, sets, reference.numerics(layer, 64))
    assert judge(outputs, declared).wrong is None
    outputs[3][5] = outputs[3][6]
    assert "off by" in str(judge(outputs, declared).wrong)


def corrupt(name: str, out: Tensor) -> Tensor:
    if name == "NaN":
        out[4, 5] = float("nan")
    elif name == "infinity":
        out[-1, 0] = float("inf")
    elif name == "poison":
        out[2, 3] = POISON
    elif name == "a token of zeros":
        out[7] = 0
    elif name == "one wrong token":
        out[6] = out[5]
    elif name == "shape":
        return out[:-1]
    elif name == "dtype":
        return out.double()
    return out


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("NaN", "NaN"),
        ("infinity", "infinity"),
        ("poison", "not written"),
        ("a token of zeros", "not written"),
        ("one wrong token", "off by"),
        ("shape", "returned"),
        ("dtype", "returned"),
    ],
)
@pytest.mark.parametrize("last", [False, True])
def test_the_gate_refuses(name: str, told: str, last: bool) -> None:
    inputs, outputs = inputs_and_right_outputs()
    outputs[-last] = corrupt(name, outputs[-last])
    verdict = judge(outputs, inputs)
    assert verdict.wrong is not None and told in verdict.wrong


def test_an_oracle_that_is_not_finite_passes_nothing() -> None:
    (given,), outputs = inputs_and_right_outputs(sets=1)
    given.want[0] = float("nan")
    assert judge(outputs, [given]).wrong is not None


def test_ids_that_name_no_expert_add_nothing() -> None:
    weights, hidden = Weights.random(SMALL, "cpu", seed=0), torch.randn(2, SMALL.H)
    ids, scale = torch.tensor([[3, -1, 99], [-1, -1, -1]], dtype=torch.int32), torch.ones(2, 3)
    experts = Experts.dense(weights.gate_up, weights.down)
    want = oracle(hidden, ids, scale, experts)
    alone = oracle(hidden[:1], ids[:1, :1], scale[:1, :1], experts)
    assert torch.equal(want[:1], alone) and not want[1].any() and want[0].any()


def test_every_token_is_checked_on_cuda_and_many_of_them_on_the_cpu() -> None:
    layer = PRESETS["qwen3-30b-a3b"]
    assert checked_tokens(layer, 16384, True, seed=0).tolist() == list(range(16384))
    assert checked_tokens(SMALL, 50, False, seed=0).tolist() == list(range(50))
    some = checked_tokens(layer, 4096, False, seed=0).tolist()
    assert 8 <= len(some) == len(set(some)) < 100 and some == sorted(some) and some[-1] == 4095
    assert checked_tokens(layer, 4096, False, seed=1).tolist() != some


def test_a_graph_that_does_not_write_its_output_again_is_refused() -> None:
    inputs, outputs = inputs_and_right_outputs()
    kept = [out.clone() for out in outputs]

    def replay() -> None:
        outputs[0].copy_(kept[0])  # and not the second set's

    verdict = check_replay(replay, outputs, inputs)
    assert verdict.wrong == "part of the output was not written"

    def whole() -> None:
        for out, was in zip(outputs, kept, strict=True):
            out.copy_(was)

    assert check_replay(whole, outputs, inputs).wrong is None
    assert check_calls([lambda: kept[0], lambda: kept[1]], inputs).wrong is None
    assert check_calls([lambda: kept[1], lambda: kept[0]], inputs).wrong is not None


def test_spread() -> None:
    assert Spread.of([float(v) for v in range(11, 0, -1)]) == Spread(6.0, 2.0, 10.0, 11)
    assert Spread.of([2.5]) == Spread(2.5, 2.5, 2.5, 1)


def test_rounds_hold_each_turn_once_and_none_follows_the_same_one_always() -> None:
    order: list[str] = []

    def call(name: str) -> Tensor:
        order.append(name)
        return torch.empty(0)

    turns = [Turn(name, "eager", [lambda name=name: call(name)] * 2) for name in "abc"]  # type: ignore[misc]
    taken = take_turns(turns, CpuClock(), rounds=12, seconds=0.0)
    assert taken == 10 and [len(turn.samples) for turn in turns] == [10, 10, 10]
    rounds = ["".join(order[i : i + 6 : 2]) for i in range(0, len(order), 6)]
    assert len(rounds) == 1 + taken and all(sorted(one) == list("abc") for one in rounds)
    before = {pair for one in rounds[1:] for pair in zip(one, one[1:], strict=False)}
    assert before == {(a, b) for a in "abc" for b in "abc" if a != b}
    again = order.copy()
    order.clear()
    take_turns(turns, CpuClock(), rounds=12, seconds=0.0)
    assert order == again, "the same rounds in every run"
    order.clear()
    assert take_turns(turns, CpuClock(), rounds=3, seconds=100.0) == 3
    assert take_turns([], CpuClock(), rounds=3, seconds=1.0) == 0


def test_what_does_not_fit_gives_up_sets_then_experts_then_says_so() -> None:
    layer, T = PRESETS["qwen3-30b-a3b"], 64
    calls = layer.working_bytes(T, 4)
    assert fit(layer, T, 4 * layer.set_bytes + calls) == (layer, 4)
    assert fit(layer, T, 4 * layer.set_bytes + calls - 1) == (layer, 2)
    free = 2 * layer.set_bytes + layer.working_bytes(T, 2) - 1
    with pytest.raises(RequestError, match="does not fit"):
        fit(layer, T, free)
    fewer, sets = fit(layer, T, free, cut_experts=True)
    assert (fewer.E, sets) == (120, 2)
    with pytest.raises(RequestError, match="does not fit"):
        fit(layer, T, layer.set_bytes // 32, cut_experts=True)
    assert free_bytes("cpu") > 0


def test_a_layer_that_makes_no_sense_is_refused() -> None:
    for wrong in ({"K": 13}, {"H": 0}, {"I": -1}):
        with pytest.raises(ContractError, match="out of range"):
            replace(SMALL, **wrong)
