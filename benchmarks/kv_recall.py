"""Long recalls through quantised KV caches: the share of exact answers, and the divergence from bf16's distribution.

    python -m ttnn_moe.models.qwen3.tiny.train_long --out DIR
    PYTHONPATH=.:benchmarks python benchmarks/kv_recall.py --model DIR --json benchmarks/results/kv_recall.json

Each prompt is one recall of records among sentences, then many questions about it, with right answers in between.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from kv_quality import BUDGETS, caches, run
from torch import Tensor

from ttnn_moe.models.qwen3 import load_model
from ttnn_moe.models.qwen3.tiny.train_long import LongRecalls
from ttnn_moe.models.qwen3.tokenizer import Tokenizer


class Heldout(LongRecalls):
    split, fill = "heldout", (0.85, 0.85)


def answered(
    model: Path, which: int, threads: int, prompts: int, length: int, chunk: int
) -> tuple[str, float, list[Tensor]]:
    """Name and bits of a cache, and log-probabilities [answer tokens, V] of each prompt; rows run apart."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(threads)
    loaded = load_model(model, "reference", "cpu", torch.bfloat16)
    out = []
    for ids, kinds in rows(model, prompts, length):
        name, bits, cache = next(islice(caches(loaded.cache_sizes, 1, length), which, None))
        logits = run(loaded, cache, [ids.tolist()], chunk)[0]
        out.append(logits[:-1][kinds[1:] == 3])
    return name, bits, out


def rows(model: Path, prompts: int, length: int) -> list[tuple[Tensor, Tensor]]:
    """ids and kinds of each prompt, up to its last whole answer of two digits and the end marker."""
    of = Heldout(Tokenizer.from_directory(model).fast, "kv_recall")
    ids, kinds = (torch.from_numpy(x) for x in of.rows(prompts, length))
    at = [(k == 3).nonzero().flatten() for k in kinds]
    ends = [int(a[len(a) // 3 * 3 - 1]) + 1 for a in at]
    return [(i[:n].long(), k[:n]) for i, k, n in zip(ids, kinds, ends, strict=True)]


def main(
    model: Annotated[Path, typer.Option(help="The checkpoint that train_long wrote.")],
    prompts: Annotated[int, typer.Option(help="Recalls, with their questions.")] = 4,
    length: Annotated[int, typer.Option(help="Tokens of a row.")] = 8192,
    chunk: Annotated[int, typer.Option(help="Tokens of a piece.")] = 128,
    json_file: Annotated[Path | None, typer.Option("--json", help="File to write.")] = None,
) -> None:
    """Measure, print, and write JSON."""
    many = 2 + 2 * len(BUDGETS)
    cores = os.cpu_count() or 2
    asked = rows(model, prompts, length)
    wants = [i[1:][k[1:] == 3] for i, k in asked]
    found: dict[str, Any] = {"tokens": sum(len(i) for i, _ in asked) // prompts, "prompts": prompts, "chunk": chunk}
    found["caches"] = []
    with ProcessPoolExecutor(min(many, cores), mp_context=get_context("spawn")) as pool:
        calls = [pool.submit(answered, model, i, max(1, cores // many), prompts, length, chunk) for i in range(many)]
        base: list[Tensor] = calls[0].result()[2]
        for call in calls:
            name, bits, got = call.result()
            right = [(g.argmax(-1) == w).view(-1, 3).all(-1) for g, w in zip(got, wants, strict=True)]
            apart = [(b.exp() * (b - g)).sum(-1) for b, g in zip(base, got, strict=True)]
            row = {"cache": name, "bits": bits, "asked": sum(map(len, right)), "right": int(torch.cat(right).sum())}
            found["caches"].append({**row, "divergence": float(torch.cat(apart).mean())})
            typer.echo(json.dumps(found["caches"][-1]))
            if json_file is not None:
                json_file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
