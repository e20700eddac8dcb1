"""Qwen3-30B-A3B with its experts shared by the GPUs of one host, beside a copy on each GPU. Random weights.

    PYTHONPATH=. torchrun --nproc-per-node 2 benchmarks/experts_shared.py --json benchmarks/results/experts_shared.json

Each rank serves its own requests, drawn as qwen3_engine.py draws them, all there at the start. Tokens a second are
those of all ranks, by the slowest rank's seconds. Before it the same requests run with shorter prompts and fewer new
tokens. Memory is that of one GPU with the model alone, and at most during the runs. The gate: with shared experts, the
bundled model's tokens are those of one GPU.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from command_line import Json, run_script, write
from need_gpu import need_gpu
from qwen3_engine import draw

from ttnn_moe.bench import report
from ttnn_moe.errors import TtnnMoeError
from ttnn_moe.models.qwen3 import PRESETS, TINY, Engine, Qwen3Moe, Tokenizer, generate, load_model
from ttnn_moe.models.qwen3.model import placed
from ttnn_moe.models.qwen3.parallel import load_shared
from ttnn_moe.models.qwen3.parallel.experts import ExpertsQwen3
from ttnn_moe.models.qwen3.parallel.serving import serve
from ttnn_moe.models.qwen3.runtime.generate import engine_for
from ttnn_moe.models.qwen3.split import Split
from ttnn_moe.models.qwen3.weights import randomize
from ttnn_moe.parallel.ranks import Ranks, start

COPIES = "copies"
EVERY = 4096
"""Tokens of a rank after which it says how far it is."""
PROMPT, NEW = (32, 1024), (16, 256)
TASKS = ("Copy: AB12", "Reverse: hello", "Upper: abc", "Copy: zz9 q", "Sort: dacb")


def equal(ranks: Ranks, exchange: str, new: int = 16) -> bool:
    """Whether this rank's tokens of the bundled model are those of the whole model on this GPU alone."""
    words = Tokenizer.from_directory(TINY)
    chats = (words.apply_chat_template([{"role": "user", "content": t}], add_generation_prompt=True) for t in TASKS)
    prompts = [words.encode(chat, add_special_tokens=False) for chat in chats][ranks.rank :: ranks.size]
    want = generate(load_model(TINY, device=ranks.device), prompts, max_new_tokens=new).tokens
    model = load_shared(TINY, ranks, "experts", exchange=exchange)
    assert isinstance(model, ExpertsQwen3)
    made = generate(model, prompts, max_new_tokens=new, engine=engine_for(model, prompts, new)).tokens
    model.leave()
    return made == want


def served(
    ranks: Ranks, engine: Engine, todo: list[tuple[list[int], int]], say: Callable[..., None]
) -> tuple[float, int]:
    """Seconds of the slowest rank for these requests, and this rank's decode steps."""
    ranks.meet()
    torch.cuda.synchronize()
    begun, steps = time.perf_counter(), engine.stats.decode_steps
    for prompt, new in todo:
        engine.add(prompt, max_new_tokens=new, stop_ids=())
    tokens, next_word = [0], [EVERY]

    def take(made: Any) -> None:
        tokens[0] += 1
        if tokens[0] >= next_word[0]:
            next_word[0] += EVERY
            say(tokens[0], "tokens in", round(time.perf_counter() - begun, 3), "s")

    if isinstance(engine.model, ExpertsQwen3):
        serve(engine, lambda: False, take)
    else:
        while engine.busy:
            for made in engine.step():
                take(made)
    torch.cuda.synchronize()
    took = time.perf_counter() - begun
    assert tokens[0] == sum(new for _, new in todo), "every request has all its tokens"
    return max(map(float, ranks.meet(str(took)))), engine.stats.decode_steps - steps


def timed(
    ranks: Ranks, make: Callable[[], Qwen3Moe], requests: int, rounds: int, say: Callable[..., None]
) -> dict[str, Any]:
    """Tokens a second of all ranks, and this GPU's memory."""
    model = make()
    randomize(model, ranks.rank)
    with torch.no_grad():
        model.embed.weight.normal_(0, 1)
    held = torch.cuda.memory_allocated()
    todo = draw(requests, PROMPT, NEW, model.config.vocab_size, ranks.rank)
    engine = Engine(model, requests, PROMPT[1] + NEW[1], page=64)
    engine.capture()
    say("captured")
    # prompts end within 20 steps; then, every second step, half of the requests end: decode steps of all sizes
    short = [(prompt[:128], 20 + round(2 * math.log2(requests / (i + 1)))) for i, (prompt, _) in enumerate(todo)]
    say("warm", served(ranks, engine, short, say))
    runs = []
    for _ in range(rounds):
        runs.append(served(ranks, engine, todo, say))
        say("served", runs[-1])
    all_new = sum(int(words) for words in ranks.meet(str(sum(new for _, new in todo))))
    seconds = statistics.median(took for took, _ in runs)
    return {
        "new_tokens_per_s": all_new / seconds,
        "seconds": seconds,
        "all_s": [took for took, _ in runs],
        "steps": runs[-1][1],
        "new_tokens": all_new,
        "model_bytes": held,
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def main(
    layers: Annotated[int | None, typer.Option(help="Keep this many layers only.")] = None,
    requests: Annotated[int, typer.Option(help="Of each rank, and rows of its engine.")] = 256,
    rounds: int = 3,
    runs: Annotated[str, typer.Option(help="Exchanges, or copies.")] = f"{COPIES},all_to_all,hierarchical",
    gate: bool = True,
    timeout: float = 60.0,
    json_file: Json = None,
) -> None:
    """Measure on every rank; rank 0 prints and writes."""
    need_gpu()
    begun = time.perf_counter()
    ranks = start("cuda", timeout)
    shape = PRESETS["qwen3-30b-a3b"]
    config = shape if layers is None else dataclasses.replace(shape, num_hidden_layers=layers)
    split = Split("experts", ranks.size, ranks.rank)
    data: dict[str, Any] = {
        "machine": {"name": torch.cuda.get_device_name(), "gpus": ranks.size},
        "versions": report.versions(),
        "layers": config.num_hidden_layers,
        "requests": requests,
        "prompt": PROMPT,
        "new": NEW,
        "rows": [],
    }

    def say(*what: object) -> None:
        if ranks.rank == 0:
            print(f"{time.perf_counter() - begun:5.1f}", *what, flush=True)

    good = True
    with ranks.watched():
        for run in runs.split(","):
            row: dict[str, Any] = {"experts": run}
            if run != COPIES and gate:
                row["equal"] = all(said == "True" for said in ranks.meet(str(equal(ranks, run))))
                good &= row["equal"]
                say(run, "the bundled model's tokens are those of one GPU:", row["equal"])

            def make(run: str = run) -> Qwen3Moe:
                if run == COPIES:
                    return Qwen3Moe.empty(config, "auto", torch.bfloat16, ranks.device)
                return placed(
                    lambda: ExpertsQwen3(config, "auto", split, ranks.turns, run), torch.bfloat16, ranks.device
                )

            if row.get("equal", True):
                row |= timed(ranks, make, requests, rounds, say)
            data["rows"].append(row)
            say(row)
            if ranks.rank == 0 and json_file is not None:
                write(json_file, data)
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        ranks.close()
    if not good:
        raise TtnnMoeError("the gate is shut: shared experts give other tokens than one GPU")


if __name__ == "__main__":
    run_script(main)
