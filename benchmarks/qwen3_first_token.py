"""Time to the first token of one prompt on a GPU, by KV cache, with captured steps and without. Random weights.

    PYTHONPATH=. python benchmarks/qwen3_first_token.py --weights mxfp4 --json first_token.json

A time is that of a generation, from Python lists of ids to the last token on the host: of one new token, and of
--later. The gate: with the bundled checkpoint and 8 bits, captured prompts give the answers of eager ones and of bf16.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import statistics
import time
from typing import Annotated, Any

import torch
import typer
from qwen3_gpu import Device, Json, Layers, described, make, prompts, seconds

from ttnn_moe.bench.floor import measure_ceilings
from ttnn_moe.errors import TtnnMoeError
from ttnn_moe.kv.formats import BUCKETED, PAGED
from ttnn_moe.models.qwen3 import PRESETS, TINY, Engine, Qwen3Moe, Tokenizer, generate, load_model
from ttnn_moe.models.qwen3.tiny.batches import answer_ids
from ttnn_moe.models.qwen3.tiny.tasks import TASKS, examples

CHUNK = 4096
"""Tokens of a piece of a prompt."""
WAYS = f"{PAGED},3,3 eager,8"


def engine_of(model: Qwen3Moe, way: str, rows: int, capacity: int) -> tuple[Engine, float]:
    """The engine of a way, `paged` or average bits, and behind them perhaps `eager`; and the seconds of its capture."""
    form, _, eager = way.partition(" ")
    kv: dict[str, Any] = {} if form == PAGED else {"kv": BUCKETED, "kv_bits": float(form)}
    engine = Engine(model, rows, capacity, prefill_chunk=CHUNK, **kv)
    start = time.perf_counter()
    if not eager:
        engine.capture()
    return engine, time.perf_counter() - start


def same_answers(device: str) -> bool:
    """Whether captured prompts of the bundled checkpoint, at 8 bits, give the answers of eager ones and of bf16."""
    model, words = load_model(TINY, device=device), Tokenizer.from_directory(TINY).fast
    texts = [answer_ids(words, one)[0] for task in TASKS for one in examples(task, "heldout", 2, seed="first token")]
    made = [
        generate(model, texts, max_new_tokens=24, engine=engine_of(model, way, 4, 1152)[0]).tokens
        for way in (PAGED, "8", "8 eager")
    ]
    return made[0] == made[1] == made[2]


def case(model: Qwen3Moe, way: str, n: int, later: int, rounds: int) -> dict[str, Any]:
    """One way with a prompt of n tokens."""
    engine, captured = engine_of(model, way, 1, max(n + later, CHUNK))
    texts = prompts(1, n, model.config.vocab_size)
    for _ in range(2):
        seconds(model, engine, texts, 1)
    first = [seconds(model, engine, texts, 1) for _ in range(rounds)]
    whole = [seconds(model, engine, texts, later) for _ in range(rounds)]
    found: dict[str, Any] = {"tokens": n, "way": way, "capture_s": captured, "all_s": first, "later_all_s": whole}
    return {**found, "first_s": statistics.median(first), "later_s": statistics.median(whole)}


def main(
    config: Annotated[str, typer.Option(help=f"One of {sorted(PRESETS)}.")] = "qwen3-30b-a3b",
    layers: Layers = None,
    weights: Annotated[str, typer.Option(help="Format of the experts.")] = "dense",
    tokens: Annotated[str, typer.Option(help="Lengths of the prompt.")] = "64,256,512,1024,2048,4096",
    ways: Annotated[str, typer.Option(help="paged, or average bits; eager: without captured prompts.")] = WAYS,
    later: Annotated[int, typer.Option(help="Tokens of the longer generation.")] = 9,
    rounds: Annotated[int, typer.Option(help="Samples of a time.")] = 5,
    device: Device = "cuda",
    seed: Annotated[int, typer.Option(help="Of weights and prompts.")] = 0,
    json_file: Json = None,
) -> None:
    """Measure and write JSON, a line a case; ways take turns for each length."""
    good = same_answers(device)
    print("the same answers:", good, flush=True)
    if not good:
        raise TtnnMoeError("the gate is shut: captured prompts give other answers")
    sizes = dataclasses.replace(PRESETS[config], weight_format=weights)
    if layers is not None:
        sizes = dataclasses.replace(sizes, num_hidden_layers=layers)
    model = make(sizes, device, torch.bfloat16, "auto", seed)
    ceilings = measure_ceilings(device, model.dtype)
    data: dict[str, Any] = {**described(model, config, ceilings, rounds), "later": later, "cases": []}
    for n in map(int, tokens.split(",")):
        for way in ways.split(","):
            data["cases"].append(found := case(model, way, n, later, rounds))
            print(
                n, way, f"{1e3 * found['first_s']:.1f} ms; {later} tokens {1e3 * found['later_s']:.1f} ms", flush=True
            )
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
            if json_file is not None:
                json_file.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
