"""Qwen3-MoE on an NPU: attention over pages, decode steps as NPU graphs; over stand-ins with the real schemas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ascend_stand_in
from npu_graphs import Npu
from paths import TINY
from ttnn_moe import api, backend
from ttnn_moe.ascend import limits
from ttnn_moe.kv.npu_paged import NpuPagedCache
from ttnn_moe.models.qwen3 import Engine, Qwen3Moe, generate
from ttnn_moe.models.qwen3.runtime import captured
from ttnn_moe.models.qwen3.runtime.graphs import NpuGraphs
from ttnn_moe.models.qwen3.tokenizer import Tokenizer
from ttnn_moe.models.qwen3.weights import load_model

PROMPTS = ["Once upon a time", "The little dog", "2 + 3 =", "One day, a girl named Lily found a red ball. She was"]


@pytest.fixture(scope="module", autouse=True)
def _ascend_on_cpu():
    with ascend_stand_in.registered():
        yield


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    tokenizer = Tokenizer.from_directory(TINY)
    return [tokenizer.encode(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected(texts: list[list[int]]) -> list[list[int]]:
    return generate(load_model(TINY, "reference", "cpu", torch.bfloat16), texts, max_new_tokens=20, stop_ids=()).tokens


def to_the_end(tokens: list[list[int]], model: Qwen3Moe) -> list[list[int]]:
    """Up to the token that ends a text: the model was not trained on what follows, where CPUs round to other tokens."""
    ends = model.config.eos_token_ids
    return [line[: next((i for i, token in enumerate(line) if token in ends), len(line)) + 1] for line in tokens]


@pytest.fixture(scope="module")
def model() -> Qwen3Moe:
    return load_model(TINY, "ascend", "cpu", torch.bfloat16)


def cache_of(model: Qwen3Moe, rows: int) -> NpuPagedCache:
    return NpuPagedCache(model.cache_sizes, rows, 256, 2 * rows, ascend_stand_in.npu())


@pytest.fixture()
def npu(monkeypatch: pytest.MonkeyPatch) -> Npu:
    made = Npu()
    monkeypatch.setattr(captured, "graphs_for", lambda device: NpuGraphs(made))
    monkeypatch.setattr(Qwen3Moe, "why_not_captured", lambda self: None)
    for module in (api, backend):  # the stand-in is no tracer: it is to see the operators of a layer
        monkeypatch.setattr(module, "watcher", lambda tensors: None)
    return made


@pytest.mark.parametrize("chunk", [5, 256])
def test_the_references_tokens_with_prompts_in_chunks(
    model: Qwen3Moe, texts: list[list[int]], expected: list[list[int]], chunk: int
) -> None:
    engine = Engine(model, cache=cache_of(model, 4), prefill_chunk=chunk, graphs=False)
    got = generate(model, texts, max_new_tokens=20, stop_ids=(), engine=engine, prefill_chunk=chunk)
    assert to_the_end(got.tokens, model) == to_the_end(expected, model)


def test_the_references_tokens_with_decode_steps_as_graphs(
    model: Qwen3Moe, texts: list[list[int]], expected: list[list[int]], npu: Npu
) -> None:
    """Buckets of 4, 2 and 1 rows, captured as the batch shrinks; each replay gets the lengths that the host knows."""
    engine = Engine(model, cache=cache_of(model, 4), prefill_chunk=16, graphs=True)
    assert not engine.runner.ahead
    numbers = [engine.add(text, max_new_tokens=n, stop_ids=()) for text, n in zip(texts, (20, 14, 9, 5), strict=True)]
    made: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.busy:
        for token in engine.step():
            made[token.sequence].append(token.token)
    lengths = (20, 14, 9, 5)
    assert [len(made[number]) for number in numbers] == list(lengths)
    wanted = [tokens[:n] for tokens, n in zip(expected, lengths, strict=True)]
    assert to_the_end([made[number] for number in numbers], model) == to_the_end(wanted, model)
    assert len(npu.graphs) == 3 and all(graph.replays for graph in npu.graphs)
    layers = model.config.num_hidden_layers
    assert all(len(graph.tasks) == layers for graph in npu.graphs)
    routed = [one for graph in npu.graphs for one in graph.records if one.function.__name__.startswith(limits.ROUTE)]
    assert routed, "and a step takes the short chain of distinct ids: no expert for absent pairs"
    assert {one.kwargs["expert_num"] for one in routed} == {model.config.num_experts}


def test_steps_captured_before_any_request_serve_them(
    model: Qwen3Moe, texts: list[list[int]], expected: list[list[int]], npu: Npu
) -> None:
    engine = Engine(model, cache=cache_of(model, 4), graphs=True)
    seen: list[tuple[int, int]] = []
    engine.capture(lambda done, total: seen.append((done, total)))
    assert seen == [(i, 3) for i in range(4)], "decode steps of 4, 2 and 1 rows; prompts run eagerly"
    tokens = generate(model, texts, max_new_tokens=20, stop_ids=(), engine=engine).tokens
    assert to_the_end(tokens, model) == to_the_end(expected, model)
    assert len(npu.graphs) == 3


@pytest.mark.parametrize("wait", ["item", "tolist", "tensor", "bool"])
def test_the_stand_in_refuses_what_waits(npu: Npu, wait: str) -> None:
    x = torch.ones(1)
    waits: dict[str, Any] = {
        "item": x.item,
        "tolist": x.tolist,
        "tensor": lambda: torch.tensor([1]),
        "bool": lambda: bool(x),
    }
    with pytest.raises(RuntimeError, match="in a capture"), npu.graph(npu.NPUGraph(), None):
        waits[wait]()
