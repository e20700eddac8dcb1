"""Time to the first token of one prompt on a GPU, by KV cache, with captured steps and without. Random weights.

    PYTHONPATH=. python benchmarks/qwen3_first_token.py --weights mxfp4 --json first_token.json

A time is that of a generation, from Python lists of ids to the last token on the host: of one new token, and of
--later. For each length, ways take turns: a way runs all of its --rounds at once, and every other turn goes through the
ways in reverse order. The gate of qwen3_gate.py stands before: with each way's cache, captured or eager, and experts of
the measured format, the bundled checkpoint gives the right answers.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from typing import Annotated, Any

import torch
import typer
from command_line import Json, numbers, run_script, write
from need_gpu import need_gpu
from qwen3_gate import cache_of, check
from qwen3_gpu import Device, Layers, described, make, prompts, seconds

from ttnn_moe.bench.floor import measure_ceilings
from ttnn_moe.kv.formats import PAGED
from ttnn_moe.models.qwen3 import PRESETS, Engine, Qwen3Moe

CHUNK = 4096
"""Tokens of a piece of a prompt."""
WAYS = f"{PAGED},3,3 eager,8"


def engine_of(model: Qwen3Moe, way: str, rows: int, capacity: int) -> tuple[Engine, float]:
    """The engine of a way, as cache_of takes it; and the seconds of its capture."""
    kv, eager = cache_of(way)
    engine = Engine(model, rows, capacity, prefill_chunk=CHUNK, **kv)
    start = time.perf_counter()
    if not eager:
        engine.capture()
    return engine, time.perf_counter() - start


def case(model: Qwen3Moe, way: str, n: int, later: int, rounds: int) -> dict[str, Any]:
    """One turn of a way with a prompt of n tokens."""
    engine, captured = engine_of(model, way, 1, max(n + later, CHUNK))
    texts = prompts(1, n, model.config.vocab_size)
    for _ in range(2):
        seconds(model, engine, texts, 1)
    first = [seconds(model, engine, texts, 1) for _ in range(rounds)]
    whole = [seconds(model, engine, texts, later) for _ in range(rounds)]
    return {"tokens": n, "way": way, "capture_s": captured, "all_s": first, "later_all_s": whole}


def joined(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """The turns of one way and length as one case."""
    first, whole = ([x for turn in turns for x in turn[key]] for key in ("all_s", "later_all_s"))
    medians = {"first_s": statistics.median(first), "later_s": statistics.median(whole)}
    return {**turns[0], "all_s": first, "later_all_s": whole, **medians}


def main(
    config: Annotated[str, typer.Option(help=f"One of {sorted(PRESETS)}.")] = "qwen3-30b-a3b",
    layers: Layers = None,
    weights: Annotated[str, typer.Option(help="Format of the experts.")] = "dense",
    tokens: Annotated[str, typer.Option(help="Lengths of the prompt.")] = "64,256,512,1024,2048,4096",
    ways: Annotated[str, typer.Option(help="paged, or average bits; eager: without captured prompts.")] = WAYS,
    later: Annotated[int, typer.Option(help="Tokens of the longer generation.")] = 9,
    rounds: Annotated[int, typer.Option(help="Samples of a time in a turn.")] = 3,
    turns: Annotated[int, typer.Option(help="How often the ways take turns.")] = 2,
    device: Device = "cuda",
    seed: Annotated[int, typer.Option(help="Of weights and prompts.")] = 0,
    json_file: Json = None,
) -> None:
    """Measure and write JSON, a line a case."""
    need_gpu(device)
    gate = check(device, ways.split(","), weights, chunk=CHUNK)
    sizes = dataclasses.replace(PRESETS[config], weight_format=weights)
    if layers is not None:
        sizes = dataclasses.replace(sizes, num_hidden_layers=layers)
    model = make(sizes, device, torch.bfloat16, "auto", seed)
    ceilings = measure_ceilings(device, model.dtype)
    data: dict[str, Any] = {**described(model, config, ceilings, rounds * turns), "gate": gate, "later": later}
    data["cases"] = []
    for n in numbers(tokens):
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways.split(",")}
        for turn in range(turns):
            for way in list(runs)[:: -1 if turn % 2 else 1]:
                runs[way].append(case(model, way, n, later, rounds))
                gc.collect()
                if device == "cuda":
                    torch.cuda.empty_cache()
        for way, each in runs.items():
            data["cases"].append(found := joined(each))
            print(
                n, way, f"{1e3 * found['first_s']:.1f} ms; {later} tokens {1e3 * found['later_s']:.1f} ms", flush=True
            )
        if json_file is not None:
            write(json_file, data)


if __name__ == "__main__":
    run_script(main)
