"""Qwen3-30B-A3B with its experts shared by the GPUs of one host, beside a copy on each GPU. Random weights.

    torchrun --nproc-per-node 2 benchmarks/experts_shared.py [--layers 48] [--requests 256] [--out FILE]

Each rank serves its own requests, all there at the start, with one prompt length and one number of new tokens. Seconds
are those of the slowest rank, without a warm-up run of the same. Memory is that of one GPU: what is allocated with the
model alone, and at most during the run. Before it, the bundled model's tokens are compared with those of one GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

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
TASKS = ("Copy: AB12", "Reverse: hello", "Upper: abc", "Copy: zz9 q", "Sort: dacb")


def equal(ranks: Ranks, exchange: str, new: int = 16) -> bool:
    """Whether this rank's tokens of the bundled model are those of the whole model on this GPU alone."""
    words = Tokenizer.from_directory(TINY)
    chats = (words.apply_chat_template([{"role": "user", "content": t}], add_generation_prompt=True) for t in TASKS)
    prompts = [words.encode(chat, add_special_tokens=False) for chat in chats][ranks.rank :: ranks.size]
    alone = load_model(TINY, device=ranks.device)
    want = [generate(alone, [ids], max_new_tokens=new).tokens[0] for ids in prompts]
    model = load_shared(TINY, ranks, "experts", exchange=exchange)
    assert isinstance(model, ExpertsQwen3)
    made = generate(model, prompts, max_new_tokens=new, engine=engine_for(model, prompts, new)).tokens
    model.leave()
    return made == want


def timed(ranks: Ranks, options: argparse.Namespace, make: Callable[[], Qwen3Moe]) -> dict[str, Any]:
    """Tokens a second of all ranks, and this GPU's memory."""
    model = make()
    randomize(model, ranks.rank)
    held = torch.cuda.memory_allocated()
    engine = Engine(model, options.requests, options.prompt + options.new)
    engine.capture()
    g = torch.Generator().manual_seed(ranks.rank)
    prompts = torch.randint(model.config.vocab_size, (options.requests, options.prompt), generator=g).tolist()
    took = []
    for _ in range(options.rounds + 1):
        ranks.meet()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        made = 0
        for prompt in prompts:
            engine.add(prompt, max_new_tokens=options.new, stop_ids=())
        if isinstance(model, ExpertsQwen3):
            tokens: list[Any] = []
            serve(engine, lambda: False, tokens.append)
            made = len(tokens)
        else:
            while engine.busy:
                made += len(engine.step())
        torch.cuda.synchronize()
        assert made == options.requests * options.new
        took.append(max(map(float, ranks.meet(str(time.perf_counter() - begin)))))
    seconds = min(took[1:])
    return {
        "seconds": round(seconds, 3),
        "new_tokens_per_s": round(ranks.size * options.requests * options.new / seconds),
        "model_gib": round(held / 2**30, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--requests", type=int, default=256, help="of each rank")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--new", type=int, default=64, help="tokens of each request")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--runs", nargs="+", default=["all_to_all", COPIES, "hierarchical"], help="exchanges, or copies"
    )
    parser.add_argument("--out")
    options = parser.parse_args()
    ranks = start("cuda")
    config = dataclasses.replace(PRESETS["qwen3-30b-a3b"], num_hidden_layers=options.layers)
    split = Split("experts", ranks.size, ranks.rank)
    rows: list[dict[str, Any]] = []

    def add(**row: Any) -> None:
        rows.append(row)
        if ranks.rank == 0:
            print(row, flush=True)
            if options.out:
                about = {"device": f"{ranks.size} x {torch.cuda.get_device_name()}", "torch": torch.__version__}
                sizes = {name: getattr(options, name) for name in ("layers", "requests", "prompt", "new")}
                Path(options.out).write_text(json.dumps({**about, **sizes, "rows": rows}, indent=1) + "\n")
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    with ranks.watched():
        for run in options.runs:
            if run == COPIES:
                whole = timed(ranks, options, lambda: Qwen3Moe.empty(config, "auto", torch.bfloat16, ranks.device))
                add(experts="a copy on each GPU", exchange="", **whole)
                continue
            same = all(said == "True" for said in ranks.meet(str(equal(ranks, run))))
            if ranks.rank == 0:
                print(f"{run}: the bundled model's tokens are those of one GPU: {same}", flush=True)

            def shared(exchange: str = run) -> Qwen3Moe:
                make = lambda: ExpertsQwen3(config, "auto", split, ranks.turns, exchange)  # noqa: E731
                return placed(make, torch.bfloat16, ranks.device)

            add(experts="shared", exchange=run, equal_to_one_gpu=same, **timed(ranks, options, shared))
        ranks.close()


if __name__ == "__main__":
    main()
