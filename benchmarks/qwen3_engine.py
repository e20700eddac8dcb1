"""Continuous batching of Qwen3-30B-A3B with random weights: throughput and latency of requests of mixed lengths.

    PYTHONPATH=. python benchmarks/qwen3_engine.py --json qwen3_engine.json

Prompt lengths are log-uniform and new tokens uniform between two bounds, drawn once; every request runs to its last
token. All requests are there at the start, or come at --rate a second (exponential gaps). Weights as in qwen3_gpu.py,
and the gate of qwen3_gate.py before all.
--steps also times decode steps of full batches: between steps of the engine, and as generate's steps.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import statistics
import time
from typing import Annotated, Any

import torch
import typer
from command_line import Json, numbers, run_script, write
from need_gpu import need_gpu
from qwen3_gate import check
from qwen3_gpu import Backend, Device, Layers, decode, described, make, prompts
from rich.console import Console
from rich.table import Table

from ttnn_moe.bench.floor import measure_ceilings
from ttnn_moe.kv.formats import PAGED
from ttnn_moe.models.qwen3 import PRESETS, Engine, Qwen3Moe
from ttnn_moe.models.qwen3.config import config_of


def draw(n: int, prompt: tuple[int, int], new: tuple[int, int], vocab: int, seed: int) -> list[tuple[list[int], int]]:
    """n prompts and how many tokens each wants."""
    rng = random.Random(seed)
    low, high = (math.log(bound) for bound in prompt)
    lengths = [round(math.exp(rng.uniform(low, high))) for _ in range(n)]
    return [([rng.randrange(vocab) for _ in range(length)], rng.randint(*new)) for length in lengths]


def arrivals(n: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start; rate 0: all at once."""
    rng, at, out = random.Random(seed + 1), 0.0, []
    for _ in range(n):
        out.append(at)
        at += rng.expovariate(rate) if rate else 0.0
    return out


def serve(engine: Engine, requests: list[tuple[list[int], int]], come: list[float]) -> dict[str, Any]:
    """Run them all: seconds, tokens a second, and what clients see (times of tokens on the host)."""
    seen: dict[int, list[float]] = {}
    came: dict[int, float] = {}
    steps, rows, left = 0, 0, list(zip(come, requests, strict=True))[::-1]
    start = time.perf_counter()
    while left or engine.busy:
        while left and left[-1][0] <= time.perf_counter() - start:
            at, (prompt, new) = left.pop()
            number = engine.add(prompt, max_new_tokens=new, stop_ids=())
            came[number], seen[number] = start + at, []
        if not engine.busy:
            time.sleep(max(0.0, left[-1][0] - (time.perf_counter() - start)))
            continue
        rows += engine.load().running
        steps += 1
        made = engine.step()
        now = time.perf_counter()
        for token in made:
            seen[token.sequence].append(now)
    took = time.perf_counter() - start
    wanted = sorted(new for _, new in requests)
    assert sorted(map(len, seen.values())) == wanted, "every request has all its tokens"
    first = [times[0] - came[number] for number, times in seen.items()]
    gaps = [b - a for times in seen.values() for a, b in zip(times, times[1:], strict=False)]
    fed, made_all = sum(len(prompt) for prompt, _ in requests), sum(wanted)
    return {
        "seconds": took,
        "prompt_tokens": fed,
        "new_tokens": made_all,
        "new_tokens_per_s": made_all / took,
        "tokens_per_s": (fed + made_all) / took,
        "steps": steps,
        "mean_rows": rows / max(steps, 1),
        "first_token_s": spread(first),
        "between_tokens_s": spread(gaps),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Mean, median and the 99th of a hundred."""
    ordered = sorted(values) or [0.0]
    return {
        "mean": statistics.fmean(ordered),
        "p50": ordered[len(ordered) // 2],
        "p99": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
    }


def full_steps(model: Qwen3Moe, B: int, prompt: int, new: int, rounds: int) -> dict[str, Any]:
    """Seconds of a decode step of B requests: the median over steps in which nobody comes or goes; and generate's."""
    engine = Engine(model, B, prompt + new, prefill_chunk=8192)
    engine.capture()
    times: list[float] = []
    for _ in range(rounds + 1):
        for text in prompts(B, prompt, model.config.vocab_size):
            engine.add(text, max_new_tokens=new, stop_ids=())
        between: list[float] = []
        while engine.busy:
            start = time.perf_counter()
            made = engine.step()
            if len(made) == B and not any(token.finish for token in made):
                between.append(time.perf_counter() - start)
        # the first and the last few have prompts beside them, or end
        times.append(statistics.median(between[2:-2] or between or [float("nan")]))
    del engine
    return {
        "B": B,
        "engine_s": statistics.median(times[1:]),
        "session_s": decode(model, B, prompt, new, rounds)[0]["step_s"],
    }


def main(
    config: Annotated[
        str, typer.Option(help=f"One of {sorted(PRESETS)}, or a checkpoint's directory.")
    ] = "qwen3-30b-a3b",
    layers: Layers = None,
    requests: Annotated[int, typer.Option(help="How many.")] = 256,
    rows: Annotated[str, typer.Option(help="Requests that run at a time; a list.")] = "32,128,256",
    prompt: Annotated[tuple[int, int], typer.Option(help="Shortest and longest prompt.")] = (32, 1024),
    new: Annotated[tuple[int, int], typer.Option(help="Fewest and most new tokens.")] = (16, 256),
    chunks: Annotated[str, typer.Option(help="Prompt tokens of a step, at most: a list; 0: the engine's own.")] = "0",
    page: Annotated[int, typer.Option(help="Tokens of a page.")] = 64,
    rate: Annotated[float, typer.Option(help="Requests a second; 0: all at the start.")] = 0.0,
    rounds: Annotated[int, typer.Option(help="Times that each is run; the median by throughput is kept.")] = 3,
    steps: Annotated[str, typer.Option(help="Batches whose decode step is timed too, beside generate's.")] = "",
    device: Device = "cuda",
    backend: Backend = "auto",
    seed: Annotated[int, typer.Option(help="Of weights, lengths and prompts.")] = 0,
    json_file: Json = None,
) -> None:
    """Measure, write JSON, print tables."""
    need_gpu(device)
    sizes = config_of(config)
    if layers is not None:
        sizes = dataclasses.replace(sizes, num_hidden_layers=layers)
    asked = [int(chunk) or None for chunk in chunks.split(",")]
    gate = [one for chunk in asked for one in check(device, (PAGED,), sizes.weight_format, backend, chunk=chunk)]
    model = make(sizes, device, torch.bfloat16, backend, seed)
    todo = draw(requests, prompt, new, sizes.vocab_size, seed)
    data: dict[str, Any] = {
        **described(model, config, measure_ceilings(device, torch.bfloat16), rounds),
        "gate": gate,
        "requests": requests,
        "prompt": prompt,
        "new": new,
        "rate": rate,
        "served": [],
        "steps": [],
    }

    def save() -> None:
        if json_file is not None:
            write(json_file, data)

    for count, chunk in itertools.product(numbers(rows), asked):
        start = time.perf_counter()
        engine = Engine(model, count, prompt[1] + new[1], page=page, prefill_chunk=chunk)
        engine.capture()
        serve(engine, todo[: min(8, requests)], [0.0] * min(8, requests))
        ready = time.perf_counter() - start
        runs = [serve(engine, todo, arrivals(requests, rate, seed)) for _ in range(rounds)]
        runs.sort(key=lambda run: run["new_tokens_per_s"])
        pages, most = engine.cache.total, engine.scheduler.chunk.most
        row = {"rows": count, "pages": pages, "prefill_chunk": most, "ready_s": ready}
        data["served"].append({**row, **runs[(len(runs) - 1) // 2], "all_s": [run["seconds"] for run in runs]})
        del engine  # its cache, before the next one's
        save()
    for B in numbers(steps):
        data["steps"].append(full_steps(model, B, 128, 128, rounds))
        save()
    show(data)


def show(data: dict[str, Any]) -> None:
    """For the terminal."""
    console = Console(width=160)
    waits = "first token p50, p99 ms|between p50, p99 ms"
    heads = f"rows|prompt tokens a step|new tokens/s|tokens/s|seconds|steps|mean rows|{waits}"
    table = Table(*heads.split("|"))
    for row in data["served"]:
        table.add_row(
            str(row["rows"]),
            f"{row['prefill_chunk']:,}",
            f"{row['new_tokens_per_s']:,.0f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['seconds']:.2f}",
            str(row["steps"]),
            f"{row['mean_rows']:.1f}",
            *(
                ", ".join(f"{row[key][p] * 1e3:.1f}" for p in ("p50", "p99"))
                for key in ("first_token_s", "between_tokens_s")
            ),
        )
    console.print(table)
    for row in data["steps"]:
        console.print(
            f"decode step of {row['B']}: engine {row['engine_s'] * 1e3:.2f} ms, generate {row['session_s'] * 1e3:.2f}"
        )


if __name__ == "__main__":
    run_script(main)
