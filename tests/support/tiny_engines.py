"""Engines of the bundled checkpoint on a CPU, random requests, and what each gets alone."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import torch

from qwen3_checkpoints import TINY, prompts
from ttnn_moe.kv.bucketed.cache import BucketedCache
from ttnn_moe.kv.paged import PagedCache
from ttnn_moe.models.qwen3 import Engine, Qwen3Moe, generate, load_model

PAGE = 16


@cache
def tiny() -> Qwen3Moe:
    return load_model(TINY, backend="reference", device="cpu", dtype=torch.float32)


def engine(rows: int = 3, capacity: int = 96, pages: int | None = None, kv: str = "paged", **options: Any) -> Engine:
    """With so many pages of 16 tokens; in the bucketed cache of 32."""
    if kv == "bucketed":
        held = BucketedCache(
            tiny().cache_sizes, rows, capacity, rows * capacity // 32 if pages is None else pages, 16, 32
        )
        # whole prompts: pieces attend to what the tiers keep of the pieces before
        return Engine(tiny(), cache=held, **{"prefill_chunk": 500, **options})
    one = PagedCache.page_bytes(tiny().cache_sizes, PAGE)
    return Engine(
        tiny(),
        rows,
        capacity,
        memory=None if pages is None else pages * one,
        page=PAGE,
        **{"prefill_chunk": 24, **options},
    )


def asked(n: int, seed: int, longest: int = 50, new: int = 20) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts with options: greedy and drawn, stopped by a token and by length."""
    rng = random.Random(seed)
    out = []
    for i, text in enumerate(prompts([rng.randint(1, longest) for _ in range(n)], 500, seed)):
        options = {"max_new_tokens": rng.choice([1, 2, new, rng.randint(1, new)]), "seed": seed + i}
        if rng.random() < 0.5:
            options |= {"temperature": rng.choice([0.7, 1.5]), "top_p": rng.choice([0.9, 1.0]), "top_k": 40}
        options["stop_ids"] = tuple(rng.sample(range(500), 30)) if rng.random() < 0.5 else ()
        out.append((text, options))
    return out


def alone(text: list[int], kv: str = "paged", **options: Any) -> list[int]:
    """The tokens of a request that runs by itself."""
    return generate(tiny(), [text], engine=engine(1, 192, kv=kv) if kv != "paged" else None, **options).tokens[0]


def collect(engine: Engine, got: dict[int, list[int]] | None = None) -> dict[int, list[int]]:
    got = {} if got is None else got
    while engine.busy:
        for token in engine.step():
            got.setdefault(token.sequence, []).append(token.token)
    return got
