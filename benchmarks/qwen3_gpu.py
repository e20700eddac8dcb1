"""Qwen3-30B-A3B with random weights on a GPU: decode steps, prefill, and where their time goes.

    PYTHONPATH=. python benchmarks/qwen3_gpu.py --json benchmarks/results/qwen3_gpu.json
    PYTHONPATH=. python benchmarks/qwen3_gpu.py --weights mxfp4 --json benchmarks/results/qwen3_gpu_mxfp4.json

Weights N(0, 0.02), norms 1, embeddings N(0, 1); --weights makes experts of random bits, of that standard deviation. The
gate of qwen3_gate.py stands before. A step's time is the median of whole generations less the median of those that end
with the first token, over the number of steps. tables.py puts the tables of bf16 into docs/qwen3.md and README.md. With
TTNN_MOE_CUDA_ARCH=sm_80 the GPU stands for an older one: every kernel is compiled for that.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from command_line import Json, numbers, one_of, run_script, write
from need_gpu import need_gpu
from older_arch import compile_for
from qwen3_gate import check
from qwen3_gpu_tables import REST, tables
from qwen3_parts import kernels_of, steps_of, times
from rich.console import Console

from ttnn_moe.bench import report
from ttnn_moe.bench.floor import Ceilings, measure_ceilings
from ttnn_moe.bench.layer import Layer
from ttnn_moe.cuda.arch import asked, stands_for
from ttnn_moe.cuda.device import gpu
from ttnn_moe.errors import RequestError
from ttnn_moe.models.qwen3 import PRESETS, Engine, Qwen3Moe, Qwen3MoeConfig, generate
from ttnn_moe.models.qwen3.runtime.generate import default_chunk
from ttnn_moe.models.qwen3.weight_formats import FORMATS
from ttnn_moe.models.qwen3.weights import randomize

Layers = Annotated[int | None, typer.Option(help="Keep this many layers only.")]
Device = Annotated[str, typer.Option(help="cuda, or cpu to try the program.")]
Backend = Annotated[str, typer.Option(help="What runs the experts.")]


def described(model: Qwen3Moe, name: str, ceilings: Ceilings, rounds: int) -> dict[str, Any]:
    """Where, with what and of which model the results are."""
    return {
        "machine": report.machine(model.device.type, ceilings),
        "versions": report.versions(),
        "config": name,
        "arch": asked(),
        "layers": model.config.num_hidden_layers,
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights": model.config.weight_format,
        "rounds": rounds,
    }


def floors(config: Qwen3MoeConfig, ceilings: Ceilings, itemsize: int) -> dict[str, Any]:
    """Seconds that the bytes of a decode step, or the operations of a prefill, take at the measured ceilings.

    A step reads every weight but the embeddings and the experts that no token visits, E (1 - (1 - K/E)^B) of E under
    uniform routing; keys and values are left out. A prefill of one prompt counts its products and its attention; of the
    last layer the products that make keys and values, for only one token goes on.
    """
    E, K = config.num_experts, config.num_experts_per_tok
    sizes = E, K, config.hidden_size, config.moe_intermediate_size
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    expert_bytes = Layer("", *sizes, weight_format=config.weight_format).expert_bytes
    heads = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    layer = config.hidden_size * (heads + E)
    kept = 2 * config.hidden_size * config.num_key_value_heads * config.head_dim
    head = config.hidden_size * config.vocab_size
    L = config.num_hidden_layers

    def step(B: int) -> float:
        visited = E * (1 - (1 - K / E) ** B)
        return (itemsize * (L * layer + head) + L * visited * expert_bytes) / ceilings.read_bytes_per_s

    def prefill(n: int) -> float:
        attention = 2 * n * n * config.num_attention_heads * config.head_dim
        whole = 2 * n * (layer + K * expert) + attention
        return ((L - 1) * whole + 2 * (n * kept + layer + K * expert + head)) / ceilings.flops_per_s

    return {"step": step, "prefill": prefill}


def make(config: Qwen3MoeConfig, device: str, dtype: torch.dtype, backend: str, seed: int) -> Qwen3Moe:
    model = Qwen3Moe.empty(config, backend, dtype, device)
    randomize(model, seed)
    with torch.no_grad():
        model.embed.weight.normal_(0, 1, generator=torch.Generator(model.device).manual_seed(seed + 1))
    return model


def prompts(B: int, n: int, vocab: int) -> list[list[int]]:
    return torch.randint(vocab, (B, n), generator=torch.Generator().manual_seed(B * n)).tolist()


def engine_of(model: Qwen3Moe, rows: int, capacity: int) -> Engine:
    """As generate makes one for a call."""
    return Engine(model, rows, capacity, prefill_chunk=default_chunk(model.device))


def seconds(model: Qwen3Moe, engine: Engine, texts: list[list[int]], new: int, **drawn: Any) -> float:
    """Of a whole generation. drawn: how its tokens are, as generate's; default: greedy."""
    start = time.perf_counter()
    made = generate(model, texts, max_new_tokens=new, stop_ids=(), engine=engine, **drawn)
    assert all(len(tokens) == new for tokens in made.tokens)
    return time.perf_counter() - start


def decode(
    model: Qwen3Moe, B: int, prompt: int, new: int, rounds: int, engine: Engine | None = None, **drawn: Any
) -> tuple[dict[str, Any], Engine]:
    """Step time and tokens a second of B sequences. drawn: as seconds'."""
    engine = engine_of(model, B, prompt + new) if engine is None else engine
    texts = prompts(B, prompt, model.config.vocab_size)
    start = time.perf_counter()
    engine.capture()
    seconds(model, engine, texts, 2, **drawn)
    warm_up = time.perf_counter() - start
    first, whole = [], []
    for _ in range(rounds):
        first.append(seconds(model, engine, texts, 1, **drawn))
        whole.append(seconds(model, engine, texts, new, **drawn))
    step = (statistics.median(whole) - statistics.median(first)) / (new - 1)
    row = {
        "B": B,
        "prompt": prompt,
        "new": new,
        "step_s": step,
        "tokens_per_s": B / step,
        "warm_up_s": warm_up,
        "first_s": first,
        "whole_s": whole,
    }
    return row, engine


def prefill(model: Qwen3Moe, n: int, rounds: int) -> tuple[dict[str, Any], Engine]:
    """Time to the first token of one prompt of n tokens, on the host: one after another, then each after REST seconds.

    A rested GPU may run faster: its power limit depends on what it did before.
    """
    engine = engine_of(model, 1, n + 1)
    engine.capture()
    texts = prompts(1, n, model.config.vocab_size)
    for _ in range(2):
        seconds(model, engine, texts, 1)
    taken = [seconds(model, engine, texts, 1) for _ in range(rounds)]
    rested = []
    for _ in range(rounds):
        time.sleep(REST)
        rested.append(seconds(model, engine, texts, 1))
    row = {
        "n": n,
        "first_token_s": statistics.median(taken),
        "all_s": taken,
        "rested_s": statistics.median(rested),
        "rested_all_s": rested,
    }
    return row, engine


def traced(run: Any, repeats: int, keep: Path | None) -> dict[str, Any]:
    """Time per part, in microseconds of one pass, of the median pass among `repeats` traced ones."""
    from torch.profiler import ProfilerActivity, profile

    run()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        kernels = kernels_of(json.loads(path.read_text()))
    passes = sorted(steps_of(kernels), key=lambda step: step[-1].end - step[0].start)
    chosen = passes[len(passes) // 2]
    if keep is not None:
        lines = (f"{k.start - chosen[0].start:10.1f} {k.end - k.start:8.1f} {k.name[:90]}" for k in chosen)
        keep.write_text("\n".join(lines) + "\n")
    parts = {part: {"us": us, "kernels": count} for part, (us, count) in times(chosen).items()}
    return {"us": chosen[-1].end - chosen[0].start, "parts": parts}


def main(
    config: Annotated[str, typer.Option(help=f"One of {sorted(PRESETS)}.")] = "qwen3-30b-a3b",
    layers: Layers = None,
    weights: Annotated[str, typer.Option(help=f"Format of the experts: {', '.join(FORMATS)}.")] = "dense",
    batches: Annotated[str, typer.Option(help="Sequences of decode.")] = "1,8,32,128",
    prefills: Annotated[str, typer.Option(help="Lengths of one prompt.")] = "128,512,4096",
    prompt: Annotated[int, typer.Option(help="Prompt tokens of a decoded sequence.")] = 128,
    new: Annotated[int, typer.Option(help="New tokens of a decoded sequence.")] = 128,
    rounds: Annotated[int, typer.Option(help="Samples of a time.")] = 5,
    temperature: Annotated[float, typer.Option(help="Decode steps draw their tokens; 0: greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="As generate's.")] = 0,
    top_p: Annotated[float, typer.Option(help="As generate's.")] = 1.0,
    traces: Annotated[str, typer.Option(help="Batches and (p...) prompt lengths to trace.")] = "1,8,32,p512,p4096",
    device: Device = "cuda",
    backend: Backend = "auto",
    seed: Annotated[int, typer.Option(help="Of weights and prompts.")] = 0,
    json_file: Json = None,
    folder: Annotated[
        Path | None, typer.Option("--kernels", help="Folder: write one traced pass of each, kernel by kernel.")
    ] = None,
) -> None:
    """Measure, write JSON, print tables."""
    need_gpu(device)
    one_of(config, PRESETS, "config")
    if weights not in FORMATS:
        raise RequestError("no such weights", got=weights, expected=f"one of {list(FORMATS)}")
    sizes = dataclasses.replace(PRESETS[config], weight_format=weights)
    if layers is not None:
        sizes = dataclasses.replace(sizes, num_hidden_layers=layers)
    dtype = torch.bfloat16
    if device == "cuda" and asked() is not None:
        compile_for(stands_for(gpu()).capability)
    gate = check(device, weights=weights, backend=backend, dtype=dtype, chunk=default_chunk(torch.device(device)))
    ceilings = measure_ceilings(device, dtype)
    floor = floors(sizes, ceilings, dtype.itemsize)
    start = time.perf_counter()
    model = make(sizes, device, dtype, backend, seed)
    drawn = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    data: dict[str, Any] = {
        **described(model, config, ceilings, rounds),
        "gate": gate,
        "drawn": drawn if temperature else None,
        "prefill_chunk": default_chunk(model.device),
        "weights_s": time.perf_counter() - start,
        "decode": [],
        "prefill": [],
        "traces": {},
    }

    def save() -> None:
        if json_file is not None:
            write(json_file, data)

    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    wanted = traces.split(",") if device == "cuda" else []
    for B in numbers(batches):
        row, engine = decode(model, B, prompt, new, rounds, **drawn)
        data["decode"].append({**row, "floor_s": floor["step"](B)})
        save()
        if str(B) in wanted:
            begin(engine, prompts(B, prompt, sizes.vocab_size))
            data["traces"][str(B)] = traced(engine.step, 5, folder / f"kernels_{B}.txt" if folder else None)
            save()
    for n in numbers(prefills):
        row, engine = prefill(model, n, rounds)
        data["prefill"].append({**row, "floor_s": floor["prefill"](n)})
        save()
        if f"p{n}" in wanted:
            whole = lambda: seconds(model, engine, prompts(1, n, sizes.vocab_size), 1)  # noqa: B023, E731
            data["traces"][f"p{n}"] = traced(whole, 3, folder / f"kernels_p{n}.txt" if folder else None)
    save()
    Console(width=200, markup=False, highlight=False).print(tables(data))


def begin(engine: Engine, texts: list[list[int]]) -> None:
    """Prefill, so that every step that follows decodes all of them."""
    for text in texts:
        engine.add(text, max_new_tokens=engine.capacity - len(text), stop_ids=())
    while engine.scheduler.waiting or engine.scheduler.filling:
        engine.step()


if __name__ == "__main__":
    run_script(main)
