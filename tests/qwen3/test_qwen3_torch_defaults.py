"""torch's defaults, autocast and inference mode change no token of an engine."""

from __future__ import annotations

import pytest
import torch

from models.qwen3 import TINY, Engine, Tokenizer, generate, load_model
from torch_defaults import defaults

PROMPTS = ("Add: 34+8", "Copy: zz9 q")


def made(kv: str) -> list[list[list[int]]]:
    model, tokenizer = load_model(TINY, device="cpu"), Tokenizer.from_directory(TINY)
    ids = [tokenizer.encode(prompt) for prompt in PROMPTS]
    runs = []
    for options in ({}, {"temperature": 0.7, "seed": 1, "stop_ids": ()}):
        engine = Engine(model, rows=2, capacity=512, kv=kv)
        runs.append(generate(model, ids, engine=engine, max_new_tokens=8, **options).tokens)
    return runs


@pytest.mark.parametrize("kv", ["paged", "bucketed"])
def test_tokens_are_the_same(kv: str) -> None:
    want = made(kv)
    for device, dtype in (("meta", torch.float32), ("cpu", torch.bfloat16), ("cpu", torch.float64)):
        with defaults(dtype, device):
            assert made(kv) == want, f"{device}, {dtype}"


@pytest.mark.parametrize("kv", ["paged", "bucketed"])
def test_autocast_changes_no_token(kv: str) -> None:
    """A bucketed cache places the tokens of a piece before the next step, outside the model."""
    model = load_model(TINY, device="cpu", dtype=torch.float32)
    prompts = torch.randint(500, (2, 150), generator=torch.Generator().manual_seed(0)).tolist()

    def tokens() -> list[list[int]]:
        engine = Engine(model, 2, 512, kv=kv, prefill_chunk=40)
        return generate(model, prompts, engine=engine, max_new_tokens=50, stop_ids=()).tokens

    want = tokens()
    with torch.autocast("cpu", torch.bfloat16):
        assert tokens() == want


@pytest.mark.parametrize("kv", ["paged", "bucketed"])
@pytest.mark.parametrize("where", ["made", "used"])
def test_an_engine_of_inference_mode_serves_outside_of_it(where: str, kv: str) -> None:
    model, stops = load_model(TINY, device="cpu"), ()
    want = generate(model, [[3] * 150], max_new_tokens=5, stop_ids=stops, engine=Engine(model, 2, 512, kv=kv)).tokens
    with torch.inference_mode(where != "used"):
        engine = Engine(model, 2, 512, kv=kv, prefill_chunk=100)
    with torch.inference_mode(where == "used"):
        cancelled = engine.add([3] * 150, max_new_tokens=9, stop_ids=stops)
        engine.step()
        engine.cancel(cancelled)
        for _ in range(2):
            assert generate(model, [[3] * 150], max_new_tokens=5, stop_ids=stops, engine=engine).tokens == want
    assert engine.cache.free == engine.cache.total
