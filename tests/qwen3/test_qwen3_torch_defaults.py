"""torch.set_default_device and torch.set_default_dtype change no token."""

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
    for options in ({}, {"temperature": 0.7, "seed": 1}):
        engine = Engine(model, rows=2, capacity=512, kv=kv)
        runs.append(generate(model, ids, engine=engine, max_new_tokens=8, **options).tokens)
    return runs


@pytest.mark.parametrize("kv", ["paged", "bucketed"])
def test_tokens_are_the_same(kv: str) -> None:
    want = made(kv)
    for device, dtype in (("meta", torch.float32), ("cpu", torch.bfloat16), ("cpu", torch.float64)):
        with defaults(dtype, device):
            assert made(kv) == want, f"{device}, {dtype}"
