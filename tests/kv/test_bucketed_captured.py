"""Prompts that begin in a captured step of the bucketed cache, beside the same prompts in steps as they come."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from test_bucketed_cache import stored
from torch import Tensor

from ttnn_moe.errors import RequestError
from ttnn_moe.kv import torch_forms
from ttnn_moe.kv.bucketed import allocation, captured
from ttnn_moe.kv.bucketed.cache import BucketedCache
from ttnn_moe.kv.bucketed.prompts import observed, observed_in_layers, observing
from ttnn_moe.kv.cache import CacheSizes
from ttnn_moe.kv.step import PrefillStep, Span, Step
from ttnn_moe.models.qwen3.runtime.graphs import Again
from ttnn_moe.models.qwen3.runtime.prefill_graphs import PrefillGraphs

LAYERS, ROWS, CAPACITY, DECODING = 3, 4, 512, 4
SIZES = CacheSizes(LAYERS, 4, 2, 32, torch.bfloat16, torch.device("cpu"))


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small high tier; and torch's attention, which reads spans, from the tiles that kernels read."""
    monkeypatch.setattr(allocation, "HIGH", ((4, 60),))

    def attend(q: Tensor, memory: Any, spans: Sequence[Span], tiles: Tensor, out: Tensor) -> Tensor:
        each = [Span(row, first, n, past) for first, n, past, row in tiles.view(-1, 4).tolist() if n]
        return torch_forms.prefill_attention(q, memory, each, out)

    monkeypatch.setattr(captured, "prefill_attention", attend)


class Model:
    """A model whose keys, values and queries are those of its tokens: ids name lines of tables [layers, 512, ..]."""

    device = SIZES.device

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(0)
        self.k, self.v = torch.randn(2, LAYERS, 512, 2, 32, generator=g).bfloat16().unbind()
        self.q = torch.randn(LAYERS, 512, 4, 32, generator=g).bfloat16()
        self.outs: list[Tensor] = []

    def __call__(self, ids: Tensor, cache: BucketedCache, step: Step) -> Tensor:
        """Of the last layer [R, heads, D]; outs: what the others attend to."""
        self.outs = []
        for layer in range(LAYERS):
            cache.write(layer, self.k[layer, ids], self.v[layer, ids], step)
            asked, at = step, ids
            if layer == LAYERS - 1 and isinstance(step, PrefillStep):
                wanted = step.wanted()
                assert wanted is not None and step.logits_at is not None
                asked, at = wanted, ids[step.logits_at]
                cache.write(layer, self.k[layer, at], self.v[layer, at], wanted)  # as the model's layer does
            self.outs.append(cache.attend(layer, self.q[layer, at], asked))
        return self.outs[-1].flatten(1)


class Pair:
    """The same steps in two caches: as they come, and captured where that serves."""

    def __init__(self, bits: float, rng: random.Random):
        self.model, self.rng = Model(), rng
        self.plain, self.fixed = (BucketedCache(SIZES, ROWS, CAPACITY, 40, bits, 64) for _ in range(2))
        self.graphs = PrefillGraphs(self.model, self.fixed, Again(), 512, DECODING)  # type: ignore[arg-type]
        for kind in self.graphs.kinds:
            self.graphs.capture(*kind)
        self.lengths = [0] * ROWS

    def open(self, row: int) -> None:
        for cache in (self.plain, self.fixed):
            cache.open(row, 400)
        self.lengths[row] = 0

    @torch.inference_mode()
    def prefill(self, chunks: list[tuple[int, int]], decoding: list[int]) -> bool:
        """Whether the step was captured."""
        first = [(row, self.lengths[row]) for row in decoding]
        ids = torch.tensor([self.rng.randrange(512) for _ in range(sum(n for _, n in chunks))])
        last = torch.tensor([self.rng.randrange(512) for _ in decoding], dtype=torch.int64)
        ends = [sum(n for _, n in chunks[: i + 1]) - 1 for i in range(len(chunks))]
        step = self.plain.prefill(chunks, ends, first)
        want, outs = self.model(torch.cat((last, ids)), self.plain, step), self.model.outs
        got = self.graphs.run(ids, chunks, ends, first, last)
        was = got is not None
        if got is None:
            got = self.model(torch.cat((last, ids)), self.fixed, self.fixed.prefill(chunks, ends, first))
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)
        T = len(decoding) + len(ids)
        for out, other in zip(self.model.outs[:-1], outs[:-1], strict=True):
            torch.testing.assert_close(out[:T], other, rtol=0.02, atol=0.02)
        for row, n in [*chunks, *((row, 1) for row in decoding)]:
            self.lengths[row] += n
        if was:
            paged = self.fixed._prompts._table.any(1).nonzero().flatten().tolist()
            assert paged == sorted(row for row, _ in chunks), "rows that decode write to no page of a prompt"
            assert not any(stored(self.fixed, row, 0) for row, _ in chunks), "the next step moves tokens to tiers"
        return was

    @torch.inference_mode()
    def decode(self, rows: list[int]) -> None:
        """One token a row; afterwards both caches hold the same."""
        ids = torch.tensor([self.rng.randrange(512) for _ in rows])
        made = [
            self.model(ids, cache, cache.decode(rows, [self.lengths[row] for row in rows]))
            for cache in (self.plain, self.fixed)
        ]
        torch.testing.assert_close(made[1], made[0], rtol=0.02, atol=0.02)
        for row in rows:
            self.lengths[row] += 1
            for layer in range(LAYERS):
                want, got = (stored(cache, row, layer) for cache in (self.plain, self.fixed))
                assert sorted(got) == list(range(self.lengths[row]))
                assert {at: bits for at, (bits, *_) in got.items()} == {at: bits for at, (bits, *_) in want.items()}
                for at, (_, k, v) in got.items():
                    assert torch.equal(k, want[at][1]) and torch.equal(v, want[at][2])


@pytest.mark.parametrize(("bits", "seed"), [(3, 0), (4, 1), (8, 2)])
def test_captured_prompts_leave_what_others_leave(bits: float, seed: int) -> None:
    rng = random.Random(seed)
    pair = Pair(bits, rng)
    for row in range(ROWS):
        pair.open(row)
    assert pair.prefill([(0, 150), (2, 7)], [])
    pair.decode([0, 2])
    assert pair.prefill([(1, 90)], [2, 0]), "with rows that decode"
    assert not pair.prefill([(1, 33)], [0]), "a piece with a past"
    pair.decode([1, 0, 2])
    assert pair.prefill([(3, 249)], [1, 2])
    assert not pair.prefill([(3, 20)], [])
    pair.decode([3, 0, 1, 2])
    for row in (0, 3):
        for cache in (pair.plain, pair.fixed):
            cache.close(row)
        pair.open(row)
    assert pair.prefill([(3, rng.randint(150, 200)), (0, rng.randint(150, 200))], [1]), "both weigh their tokens"
    for _ in range(40):
        pair.decode([0, 1, 2, 3])


def test_a_prompt_whose_row_is_closed_before_the_next_step_is_gone() -> None:
    pair = Pair(3, random.Random(0))
    pair.open(0)
    pair.prefill([(0, 200)], [])
    for cache in (pair.plain, pair.fixed):
        cache.close(0)
    pair.open(1)
    assert pair.prefill([(1, 130)], [])
    pair.decode([1])


def test_what_captured_steps_leave_to_others() -> None:
    pair = Pair(3, random.Random(0))
    cache = pair.fixed
    for row in range(ROWS):
        cache.open(row, 100)
    assert cache.captures([(row, 5) for row in range(ROWS)]) and ROWS == captured.SEQUENCES
    assert not cache.captures([(row, 5) for row in (0, 1, 2, 3, 0)])
    wide = BucketedCache(CacheSizes(1, 1, 1, 32, torch.float32, torch.device("cpu")), 1, 128, 2)
    assert wide.why_not_captured_prompts() == "keys and values are not bf16"
    with pytest.raises(RequestError, match="stands twice"):
        cache.stage([(0, 5), (0, 5)], [])
    with pytest.raises(RequestError, match="does not fit"):
        cache.stage([(0, 500)], [])
    held = cache.room(1)
    for step in (partial(cache.prefill, [(0, 5)], []), partial(cache.stage, [(0, 5)]), cache.begin):
        with pytest.raises(RequestError, match=f"sequence 1 does not fit.*got {held} tokens and 1 more"):
            step(decoding=[(1, held)])
    assert cache.lengths[0] == 0 and not any(cache.places.units), "nothing has moved"


def test_tokens_weigh_the_same_layer_by_layer_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    for n in (1, 31, 150):
        q, k = torch.randn(5, n, 4, 32), torch.randn(5, n, 2, 32)
        want = sum((observed(a, b, None) for a, b in zip(q, k, strict=True)), torch.zeros(n))
        for room in (1, 10**9):
            monkeypatch.setattr("ttnn_moe.kv.bucketed.prompts.SCORES", room)
            torch.testing.assert_close(observed_in_layers(q[:, observing(n)], k), want)
