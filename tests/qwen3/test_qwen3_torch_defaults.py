"""torch.set_default_device and torch.set_default_dtype change no token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from models.qwen3 import TINY, Engine, Tokenizer, generate, load_model

PROMPTS = ("Add: 34+8", "Copy: zz9 q")


@contextmanager
def defaults(device: str, dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_device(), torch.get_default_dtype()
    torch.set_default_device(device)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_device(None if before[0].type == "cpu" else before[0])
        torch.set_default_dtype(before[1])


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
        with defaults(device, dtype):
            assert made(kv) == want, f"{device}, {dtype}"
