"""The model's benchmark: parts of a trace, floors, tables. What it measures needs a GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest

from benchmark_scripts import script
from ttnn_moe.models.qwen3 import PRESETS


@pytest.fixture(scope="module")
def program() -> ModuleType:
    return script("qwen3_gpu")


ROPE, EXPERTS = "q/k norm, RoPE, cache", ["experts"]
ONE = "few_linear head_norm_rope decode_attention merge_attention few_linear few_linear".split()
ONE += "router_topk few_gate_up few_down".split()
ONE_PARTS = ["qkv", ROPE, "attention", "attention", "out", "router", "top-k", *EXPERTS * 2]
MANY = "rms_norm nvjet_qkv splitKreduce_kernel head_norm_rope flash_fwd_splitkv_combine_kernel nvjet_out".split()
MANY += "splitKreduce_kernel rms_norm nvjet_router router_topk routing_sort gate_up grouped_matmul combine".split()
MANY_PARTS = ["norms", "qkv", "qkv", ROPE, "attention", "out", "out", "norms", "router", "top-k", *EXPERTS * 4]
FEW = "decode_linear head_norm_rope decode_attention decode_linear router_logits".split()
FEW += "router_topk routing_sort grouped_mlp combine".split()
FEW_PARTS = ["qkv", ROPE, "attention", "out", "router", "top-k", *EXPERTS * 3]
ROUTED = [*FEW[:4], "norm_route", *FEW[6:]]
ROUTED_PARTS = [*FEW_PARTS[:5], *EXPERTS * 3]

# keys and values of all tokens, then the layer for those whose logits are wanted
ENDING = [*MANY[:4], "indexSelect", *ONE, "few_linear"]
ENDING_PARTS = [*MANY_PARTS[:4], "rest", *ONE_PARTS, "head"]


@pytest.mark.parametrize(
    ("layer", "parts", "end", "end_parts"),
    [
        (MANY, MANY_PARTS, ENDING, ENDING_PARTS),
        (ONE, ONE_PARTS, ["few_linear", "reduce_kernel"], ["head", "rest"]),
        (FEW, FEW_PARTS, ["rms_norm", "nvjet_head", "reduce_kernel"], ["norms", "head", "rest"]),
        (ROUTED, ROUTED_PARTS, ["few_linear", "reduce_kernel"], ["head", "rest"]),
        (MANY, MANY_PARTS, ["rms_norm", "nvjet_head", "reduce_kernel"], ["norms", "head", "rest"]),
    ],
)
def test_kernels_are_told_apart_by_name_and_place(program, layer, parts, end, end_parts) -> None:
    label = sys.modules["qwen3_parts"].label
    names = ["indexSelect", *layer * 3, *end, "Memcpy DtoH (Device -> Pinned)"]
    assert label(names) == ["rest", *parts * 3, *end_parts, "rest"]


def test_parts_add_up_to_the_step_whatever_overlaps(program) -> None:
    parts = sys.modules["qwen3_parts"]
    # the second begins before the first ends; then nothing for 4 us; then a copy to the host
    spans = [("few_linear", 10, 20), ("head_norm_rope", 15, 23), ("decode_attention", 27, 30), ("Memcpy DtoH", 30, 31)]
    events = [{"cat": "kernel", "name": n, "ts": a, "dur": b - a} for n, a, b in [*spans, ("next", 40, 50)]]
    trace = {"traceEvents": [*reversed(events), {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 99}]}
    steps = parts.steps_of(parts.kernels_of(trace))
    assert [len(step) for step in steps] == [4, 1]
    times = parts.times(steps[0])
    assert times == {"qkv": (10, 1), "q/k norm, RoPE, cache": (3, 1), "attention": (7, 1), "rest": (1, 1)}
    assert sum(us for us, _ in times.values()) == 21


def test_floors_of_the_real_sizes(program) -> None:
    from ttnn_moe.bench.floor import Ceilings

    floor = program.floors(PRESETS["qwen3-30b-a3b"], Ceilings(4.3e12, 790e12), 2)
    # 1.42, 6.05, 12.6, 14.6 and 37 ms, counted by hand
    assert [round(floor["step"](B) * 1e3, 1) for B in (1, 8, 32, 128)] == pytest.approx(
        [1.4, 6.0, 12.4, 14.1], rel=0.05
    )
    assert floor["prefill"](4096) * 1e3 == pytest.approx(37, rel=0.2)
    packed = program.floors(replace(PRESETS["qwen3-30b-a3b"], weight_format="mxfp4"), Ceilings(4.3e12, 790e12), 2)
    experts = 48 * 8 * 3 * 2048 * 768  # weights of those that one token visits
    assert packed["step"](1) == pytest.approx(floor["step"](1) - experts * (16 - 4.25) / 8 / 4.3e12)
    assert packed["prefill"](4096) == floor["prefill"](4096)


def test_the_engines_benchmark_serves_every_request(program) -> None:
    import torch

    from ttnn_moe.models.qwen3 import TINY, Engine, load_model

    qwen3_engine = script("qwen3_engine")
    todo = qwen3_engine.draw(7, (4, 40), (1, 6), 500, 0)
    assert all(4 <= len(text) <= 40 and 1 <= new <= 6 for text, new in todo) and todo[0] != todo[1]
    assert qwen3_engine.draw(7, (4, 40), (1, 6), 500, 0) == todo
    come = qwen3_engine.arrivals(7, 100.0, 0)
    assert come[0] == 0 and come == sorted(come) and qwen3_engine.arrivals(3, 0.0, 0) == [0, 0, 0]
    engine = Engine(load_model(TINY, backend="reference", device="cpu", dtype=torch.float32), 3, 64)
    row = qwen3_engine.serve(engine, todo, come)
    lengths = [(len(text), new) for text, new in todo]
    assert (row["prompt_tokens"], row["new_tokens"]) == tuple(map(sum, zip(*lengths, strict=True)))
    assert row["new_tokens_per_s"] == pytest.approx(row["new_tokens"] / row["seconds"])
    assert 0 < row["mean_rows"] <= 3 and 0 < row["first_token_s"]["p50"] <= row["first_token_s"]["p99"] < row["seconds"]
