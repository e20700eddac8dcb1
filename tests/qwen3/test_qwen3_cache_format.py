"""A cache format of one's own, made in tests/support/fp8_rows.py alone, under the engine and under generate."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fp8_rows import Fp8Rows, from_fp8, to_fp8
from qwen3_checkpoints import TINY, make, prompts
from ttnn_moe.errors import RequestError
from ttnn_moe.kv.paged import PagedCache
from ttnn_moe.kv.step import Step
from ttnn_moe.models.qwen3 import Engine, Qwen3Moe, generate, load_model

ROWS, CAPACITY = 3, 48


class Rounded(PagedCache):
    """Pages of keys and values in the model's dtype, which went through fp8."""

    def norm_rope_write(self, *args: object) -> None:
        return None

    def write(self, layer: int, k: Tensor, v: Tensor, step: Step) -> None:
        super().write(layer, *(from_fp8(to_fp8(x), x.dtype) for x in (k, v)), step)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Qwen3Moe:
    return load_model(make(tmp_path_factory.mktemp("model")), backend="reference", device="cpu")


def engines(model: Qwen3Moe) -> tuple[Engine, Engine]:
    caches = Fp8Rows(model.cache_sizes, ROWS, CAPACITY), Rounded.within(model.cache_sizes, ROWS, CAPACITY, page=16)
    one, other = (Engine(model, capacity=CAPACITY, prefill_chunk=10, cache=cache) for cache in caches)
    return one, other


def test_requests_come_and_go(model: Qwen3Moe) -> None:
    rng = random.Random(0)
    todo = [
        (text, {"max_new_tokens": rng.randint(1, 12), "seed": i, "temperature": i % 2, "stop_ids": ()})
        for i, text in enumerate(prompts([5, 17, 1, 30, 9, 12, 3]))
    ]
    made = []
    for engine in engines(model):
        got: dict[int, list[int]] = {}
        for text, options in todo:
            engine.add(text, **options)
        while engine.busy:
            for token in engine.step():
                got.setdefault(token.sequence, []).append(token.token)
        assert engine.load().free_rows == engine.rows == ROWS and engine.load().free_pages == engine.cache.total
        made.append(got)
    assert made[0] == made[1]
    assert [len(tokens) for _, tokens in sorted(made[0].items())] == [options["max_new_tokens"] for _, options in todo]


def test_generate(model: Qwen3Moe) -> None:
    texts, options = prompts([5, 17, 9]), {"max_new_tokens": 20, "stop_ids": ()}
    ours, rounded = (generate(model, texts, engine=engine, **options) for engine in engines(model))
    assert ours.tokens == rounded.tokens and ours.stats.decode_steps >= 19
    assert ours.tokens != generate(model, texts, **options).tokens, "fp8 keys and values change some token"


def test_a_budget_out_of_reach_names_no_capacity_beyond_the_context() -> None:
    """Of 3,000 tokens here."""
    model = load_model(TINY, backend="reference", device="cpu")
    model.config = dataclasses.replace(model.config, max_position_embeddings=3000)
    with pytest.raises(RequestError, match=r"kv_bits=2.1 in rows of 512 .*at least 3.13: .*: take kv_bits=3.13\.$"):
        Engine(model, 1, 512, kv="bucketed", kv_bits=2.1)
    with pytest.raises(RequestError, match=r": take kv_bits=3.13, or a capacity of 3000 tokens\.$"):
        Engine(model, 1, 512, kv="bucketed", kv_bits=2.25)


def test_what_it_cannot_do_is_refused(model: Qwen3Moe, tmp_path: Path) -> None:
    engine = engines(model)[0]
    with pytest.raises(RequestError, match="at most 48 together"):
        engine.add([1] * 40, max_new_tokens=9)
    with pytest.raises(RequestError, match="captured.*Fp8Rows"):
        Engine(model, cache=Fp8Rows(model.cache_sizes, 1, 16), graphs=True)
    assert torch.equal(torch.tensor(engine.cache.lengths), torch.zeros(ROWS + 1, dtype=torch.int64))
