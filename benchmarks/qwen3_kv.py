"""Decode steps of Qwen3-30B-A3B with random weights on a GPU: a bucketed KV cache beside bf16's.

    PYTHONPATH=. python benchmarks/qwen3_kv.py --json benchmarks/results/qwen3_kv.json

Each case is rows:tokens; rows may be `most`, as many as the GPU's memory holds, in the format that has no other case.
Up to --prefilled tokens an engine feeds real prompts, and a step's time is that of qwen3_gpu.py. Longer caches are
drawn: random levels and scales, or random bf16 keys and values, and no prompt runs. A step is then one captured replay
with what the host does before it (moves of tokens to lower tiers included), without the engine's queue: the median of
--rounds runs of --steps. Before all stands the gate of qwen3_gate.py, with each cache format. Drawn caches hold no
prompt, so only their times count.
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
from command_line import Json, run_script, write
from need_gpu import need_gpu
from qwen3_gate import check
from qwen3_gpu import Device, Layers, decode, described, make

from ttnn_moe.bench.floor import measure_ceilings
from ttnn_moe.errors import RequestError
from ttnn_moe.kv.bucketed.cache import BucketedCache
from ttnn_moe.kv.cache import RowCache
from ttnn_moe.kv.formats import BUCKETED, PAGED, bytes_for
from ttnn_moe.kv.paged import PagedCache
from ttnn_moe.models.qwen3 import PRESETS, Engine, Qwen3Moe
from ttnn_moe.models.qwen3.model import sizes_of
from ttnn_moe.models.qwen3.runtime.decode_graphs import DecodeGraphs
from ttnn_moe.models.qwen3.runtime.graphs import graphs_for

LEFT = 6 << 30
"""Bytes that `most` rows leave free: what a step needs besides weights and cache."""


def fill(cache: RowCache, tokens: int) -> None:
    """Open every row, as if a prompt of so many random tokens had run."""
    for row in range(cache.rows):
        cache.open(row, cache.capacity)
        cache.lengths[row] = tokens
    if isinstance(cache, BucketedCache):
        for bits, layers in cache.places.tiers.items():
            tier = layers.together
            if bits == 16:
                tier.payload.view(torch.bfloat16).normal_()
                tier.scales.fill_(1)
            else:
                tier.payload.random_()
                tier.scales.uniform_(2.0**-bits, 2.0 ** (1 - bits))
        for row in range(cache.rows):
            cache.places.units[row] = cache.allocation.moved(tokens)
            cache.places.count(row)
        cache.places.refresh()
    elif isinstance(cache, PagedCache):
        cache.k.normal_(), cache.v.normal_()


def drawn(model: Qwen3Moe, cache: RowCache, tokens: int, steps: int, rounds: int) -> list[float]:
    """Seconds of a step, of each round."""
    fill(cache, tokens)
    rows, device = list(range(cache.rows)), model.device
    graphs = DecodeGraphs(model, cache, graphs_for(device))
    graphs.join(torch.zeros(len(rows), dtype=torch.int64, device=device), [tokens] * len(rows), rows)
    at, times = tokens, []

    def step() -> None:
        nonlocal at
        cache.begin([(row, at) for row in rows])
        graphs.step()
        at += 1

    with torch.inference_mode():
        for _ in range(4):
            step()
        for _ in range(rounds):
            _wait(device)
            start = time.perf_counter()
            for _ in range(steps):
                step()
            _wait(device)
            times.append((time.perf_counter() - start) / steps)
    return times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def most_rows(model: Qwen3Moe, kv: str, bits: float | None, capacity: int) -> int:
    """Rows of so many tokens that the GPU's memory holds beside the model."""
    sizes = sizes_of(model.config, model.dtype, model.device)
    free = torch.cuda.mem_get_info()[0] - LEFT
    return int(free // bytes_for(kv, bits, sizes, 1, capacity))


def case(
    model: Qwen3Moe, rows: str, tokens: int, form: str, capacity: int, prefilled: int, steps: int, rounds: int
) -> dict[str, Any]:
    """One format's step. form: paged, or average bits."""
    kv, bits = (PAGED, None) if form == PAGED else (BUCKETED, float(form))
    capacity = max(capacity, tokens + 4 + steps * rounds)
    B = most_rows(model, kv, bits, capacity) if rows == "most" else int(rows)
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    cache = model.new_cache(B, capacity, 1 << 60, None, kv, bits)
    out: dict[str, Any] = {"rows": B, "tokens": tokens, "capacity": cache.capacity, "kv": kv, "bits": bits}
    if tokens <= prefilled:
        row, _ = decode(model, B, tokens, 128, rounds, Engine(model, cache=cache))
        out |= {"from": "prompts", "step_s": row["step_s"], "whole_s": row["whole_s"]}
    else:
        times = drawn(model, cache, tokens, steps, rounds)
        out |= {"from": "drawn", "step_s": statistics.median(times), "all_s": times}
    out["cache_bytes"] = bytes_for(kv, bits, model_sizes(model), B, capacity)
    if model.device.type == "cuda":
        out["peak_bytes"] = torch.cuda.max_memory_allocated()
    return out


def model_sizes(model: Qwen3Moe) -> Any:
    return sizes_of(model.config, model.dtype, model.device)


def main(
    config: Annotated[str, typer.Option(help=f"One of {sorted(PRESETS)}.")] = "qwen3-30b-a3b",
    layers: Layers = None,
    cases: Annotated[str, typer.Option(help="rows:tokens, a list.")] = "1:128,1:32768,32:32768,most:32768",
    formats: Annotated[str, typer.Option(help="paged, or average bits: a list, in turn for each case.")] = "paged,3,8",
    capacity: Annotated[int, typer.Option(help="Tokens of a row, at least.")] = 4096,
    prefilled: Annotated[int, typer.Option(help="Up to so many tokens, prompts are real.")] = 4096,
    steps: Annotated[int, typer.Option(help="Steps of a round.")] = 64,
    rounds: Annotated[int, typer.Option(help="Samples of a time.")] = 5,
    turns: Annotated[int, typer.Option(help="How often the formats take turns.")] = 2,
    device: Device = "cuda",
    seed: Annotated[int, typer.Option(help="Of weights and prompts.")] = 0,
    json_file: Json = None,
) -> None:
    """Measure and write JSON, a line a case. Of each case, the best of its turns counts."""
    need_gpu(device)
    sizes = PRESETS[config]
    if layers is not None:
        sizes = dataclasses.replace(sizes, num_hidden_layers=layers)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    gate = check(device, formats.split(","), sizes.weight_format, dtype=dtype)
    model = make(sizes, device, dtype, "auto", seed)
    data: dict[str, Any] = {
        **described(model, config, measure_ceilings(device, model.dtype), rounds),
        "gate": gate,
        "steps": steps,
        "cases": [],
    }
    for rows, tokens in (given.split(":") for given in cases.split(",")):
        for form in formats.split(",") * turns:
            try:
                found = case(model, rows, int(tokens), form, capacity, prefilled, steps, rounds)
            except (RequestError, torch.OutOfMemoryError) as error:
                found = {"rows": rows, "tokens": int(tokens), "form": form, "error": str(error)[:120]}
            data["cases"].append(found)
            print(json.dumps(found), flush=True)
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
            if json_file is not None:
                write(json_file, data)


if __name__ == "__main__":
    run_script(main)
