"""The gate of the benchmarks of the whole model: a bundled checkpoint answers held-out tasks, to the letter.

It has the measured weight format and dtype. It runs on the measured device, by the measured backend, in an engine with
each measured KV cache, captured where that is. Examples are fixed, and the reference backend answers them by a clear
margin; one is a recall of 800 to 900 tokens, most of which a bucketed cache keeps in its low tiers.

What it does not see: the checkpoint has its own sizes (head_dim 64, H 128, 16 experts), so kernels that serve only the
measured sizes do not run. moe_layer.py, kv_attention.py and the tests compare these.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ttnn_moe.errors import RequestError, TtnnMoeError
from ttnn_moe.kv.formats import BUCKETED, PAGED
from ttnn_moe.models.qwen3 import TINY, TINY_INT4_24, Engine, Qwen3Moe, Tokenizer, generate, load_model
from ttnn_moe.models.qwen3.quantize import quantize_model
from ttnn_moe.models.qwen3.tiny.batches import answer_ids
from ttnn_moe.models.qwen3.tiny.tasks import TASKS, Example, examples

SEED, LONG = "gate 0", (750, 900)
"""Of the examples: the reference's answers have clear margins in every weight format. Bytes of the long recall."""
CAPACITY, ROWS, STEP = 1152, 4, 0.25
"""Tokens and rows of an engine; how far bits go up where its rows are too short for them."""


def asked(per_task: int) -> list[Example]:
    """Held-out examples of every task, and a long recall."""
    short = [one for task in TASKS for one in examples(task, "heldout", per_task, SEED)]
    return [*short, *examples("recall", "heldout", 1, SEED, context=LONG)]


def bundled(weights: str, backend: str, device: str, dtype: torch.dtype) -> Qwen3Moe:
    """The bundled checkpoint with experts of this format; MXFP4's are made from the dense ones."""
    with tempfile.TemporaryDirectory() as folder:
        directory = {"dense": TINY, "int4_24": TINY_INT4_24}.get(weights, Path(folder) / weights)
        if directory.parent == Path(folder):
            quantize_model(TINY, directory, weights, device="cpu")
        return load_model(directory, backend, device, dtype)


def cache_of(way: str) -> tuple[dict[str, Any], bool]:
    """Engine's arguments of a way, `paged` or average bits, and behind them perhaps `eager`; and whether it is."""
    form, _, eager = way.partition(" ")
    return {} if form == PAGED else {"kv": BUCKETED, "kv_bits": float(form)}, bool(eager)


def engine_of(model: Qwen3Moe, way: str, chunk: int | None) -> tuple[Engine, float | None]:
    """An engine of a way; and its average bits: the next ones that rows of CAPACITY tokens can have."""
    kv, eager = cache_of(way)
    while True:
        try:
            engine = Engine(model, ROWS, CAPACITY, prefill_chunk=chunk, **kv)
            break
        except RequestError:
            if kv.get("kv_bits", 16) >= 16:
                raise
            kv["kv_bits"] += STEP
    if not eager:
        engine.capture()
    return engine, kv.get("kv_bits")


def check(
    device: str,
    ways: Sequence[str] = (PAGED,),
    weights: str = "dense",
    backend: str = "auto",
    dtype: torch.dtype = torch.bfloat16,
    chunk: int | None = None,
) -> list[dict[str, Any]]:
    """Of each way: how many were asked and right, at which bits, in how many seconds. It prints them.

    Args:
        ways: KV caches, as cache_of takes them.
        chunk: prompt tokens of a step; default: the engine's.

    Raises:
        TtnnMoeError: the gate is shut: an answer is wrong.
    """
    begun = time.perf_counter()
    model, words = bundled(weights, backend, device, dtype), Tokenizer.from_directory(TINY).fast
    some = asked(1 if device == "cpu" else 2)
    pairs = [answer_ids(words, one) for one in some]
    found = []
    for way in dict.fromkeys(ways):
        engine, bits = engine_of(model, way, chunk)
        made = generate(model, [prompt for prompt, _ in pairs], max_new_tokens=40, engine=engine).tokens
        wrong = [i for i, (_, answer) in enumerate(pairs) if made[i] != answer]
        seconds, begun = time.perf_counter() - begun, time.perf_counter()
        row = {"weights": weights, "kv": way, "bits": bits, "asked": len(some), "right": len(some) - len(wrong)}
        found.append({**row, "seconds": round(seconds, 1)})
        print("gate:", found[-1], flush=True)
        if wrong:
            raise TtnnMoeError(
                f"the gate is shut: with {weights} weights and the cache {way!r} on {device}, the bundled checkpoint "
                f"gives wrong answers to {len(wrong)} of {len(some)} held-out prompts",
                details=[f"{some[i].task}: got {words.decode(made[i])!r}, expected {some[i].answer!r}" for i in wrong],
            )
        del engine
    del model
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return found
