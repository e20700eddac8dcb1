"""The engine under random load, for a time: make soak [ARGS="--seconds 60 --seed 7"].

Each round makes an engine with few rows and few pages. Good and bad requests come at random, clients cancel, go away,
and die; text fails. Then every request is compared with the same request alone, and every row and page must be free.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from typing import Annotated

import torch
import typer

from paths import TINY
from soak_checks import Book
from soak_clients import STUCK, callback_that_raises, interleaved, step_server, threads
from soak_requests import FaultyTokenizer
from ttnn_moe.kv.paged import PagedCache
from ttnn_moe.models.qwen3 import Engine, Qwen3Moe, Tokenizer, load_model
from ttnn_moe.models.qwen3.runtime.engine import Load

PAGE = 16


def engine_of(model: Qwen3Moe, tokenizer: Tokenizer, rng: random.Random) -> Engine:
    """An engine of random limits, with too little memory for all of its rows."""
    pages = rng.randint(2, 12)
    engine = Engine(
        model,
        rng.randint(1, 6),
        rng.choice([32, 48, 128]),
        memory=pages * PagedCache.page_bytes(model.cache_sizes, PAGE),
        page=PAGE,
        prefill_chunk=rng.choice([1, 5, 24, 300]),
        max_waiting=rng.choice([None, None, 1, 4]),
        tokenizer=rng.choice([None, FaultyTokenizer(tokenizer)]),
    )
    if not engine.scheduler.ahead:
        engine.scheduler.ahead = rng.random() < 0.5  # as with graphs
    return engine


def run_round(model: Qwen3Moe, tokenizer: Tokenizer, rng: random.Random, book: Book) -> None:
    """One engine's life."""
    engine = engine_of(model, tokenizer, rng)
    kind = rng.choice(["steps", "streams", "threads"])
    book.count(f"rounds of {kind}")
    if kind == "steps":
        step_server(engine, rng, book, rng.randint(5, 40))
    else:
        (interleaved if kind == "streams" else threads)(engine, rng, book, rng.randint(1, 8))
    gc.collect()
    drain(engine)  # requests of clients that died before they had a stream
    for number in list(engine._requests):
        engine.cancel(number)
    if rng.random() < 0.3:
        callback_that_raises(engine, rng, book)
        drain(engine)  # a step that was under way
    check_free(engine, book)
    book.count("tokens made", engine.stats.new_tokens)
    book.compare(model, None if engine.tokenizer is None else tokenizer)


def drain(engine: Engine) -> None:
    for _ in range(STUCK):
        if not engine.busy:
            break
        engine.step()


def check_free(engine: Engine, book: Book) -> None:
    """Nothing is held any more: rows, pages, requests."""
    total = engine.cache.total
    if engine.load() != Load(0, 0, engine.rows, total) or engine.busy or engine._requests:
        book.problem(f"left over: {engine.load()} of {engine.rows} rows and {total} pages, {engine._requests}")
    pages = engine.cache.pool.take(engine.cache.free)
    if sorted(pages) != list(range(1, total + 1)) or sorted(engine.scheduler.free_rows) != list(range(engine.rows)):
        book.problem(f"pages {sorted(pages)} of {total}, rows {sorted(engine.scheduler.free_rows)}")
    engine.cache.pool.give(pages)


def soak(seconds: float, seed: int, rounds: int | None = None, first: int = 0, model: Qwen3Moe | None = None) -> Book:
    """Rounds until the time is over, or so many; each has a random generator of its own.

    Args:
        first: number of the first round. model: default: the bundled checkpoint on a CPU.
    """
    model = model or load_model(TINY, backend="reference", device="cpu", dtype=torch.float32)
    tokenizer, book, end, number = Tokenizer.from_directory(TINY), Book(), time.monotonic() + seconds, first
    while time.monotonic() < end and (rounds is None or number < first + rounds) and not book.problems:
        try:
            run_round(model, tokenizer, random.Random(f"{seed} {number}"), book)
        except Exception as error:
            book.problem(f"{error!r}")
        book.problems[:] = [f"seed {seed}, round {number}: {what}" for what in book.problems]
        number += 1
    book.count("rounds", number - first)
    return book


def main(
    seconds: Annotated[float, typer.Option(help="How long.", min=0, max=600)] = 600,
    seed: Annotated[int | None, typer.Option(help="Of all rounds; default: another one each time.")] = None,
    first: Annotated[int, typer.Option(help="Begin with this round, to repeat it.")] = 0,
    rounds: Annotated[int | None, typer.Option(help="At most.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where one is.")] = "auto",
) -> None:
    """Run the soak, print what happened, and exit with 1 if something went wrong."""
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    print(f"seed {seed}, on {device}", flush=True)
    model = load_model(TINY, "cuda" if device == "cuda" else "reference", device, torch.float32)
    start = time.monotonic()
    book = soak(seconds, seed, rounds, first, model)
    for what, n in sorted(book.counts.items()):
        print(f"{n:10,}  {what}")
    print(f"{time.monotonic() - start:10,.0f}  seconds")
    for problem in book.problems:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    raise typer.Exit(1 if book.problems else 0)


if __name__ == "__main__":
    typer.run(main)
