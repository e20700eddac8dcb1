"""What a quantised KV cache costs in quality: attention's error on three draws, and the bundled model's answers.

    PYTHONPATH=. python benchmarks/kv_quality.py --out benchmarks/results/kv_quality.json

Runs on a CPU, in about ten minutes. `--part error` and `--part tasks` run one half.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from command_line import run_script, write
from torch import Tensor

from ttnn_moe.errors import RequestError
from ttnn_moe.kv.bucketed.cache import BucketedCache
from ttnn_moe.kv.bucketed.quantise import dequantise, quantise, rotate
from ttnn_moe.kv.cache import CacheSizes, RowCache
from ttnn_moe.kv.paged import PagedCache
from ttnn_moe.kv.step import PrefillStep, Span, Step
from ttnn_moe.models.qwen3 import TINY, Engine, Qwen3Moe, generate, load_model
from ttnn_moe.models.qwen3.tiny.batches import answer_ids
from ttnn_moe.models.qwen3.tiny.tasks import TASKS, examples
from ttnn_moe.models.qwen3.tokenizer import Tokenizer

BITS = (2, 3, 4, 8)
BUDGETS = (2.5, 3.0, 4.0, 6.0)
GROUP = 64
"""Tokens that share a scale, where keys have scales per channel."""

Pair = tuple[Tensor, Tensor]


def rounded(x: Tensor, bits: int, turn: bool = True) -> Tensor:
    """Vectors [..., D], quantised and back; turn: in the rotated space."""
    y = rotate(x.float()) if turn else x.float()
    y = dequantise(*quantise(y, bits), bits)
    return (rotate(y) if turn else y).to(x.dtype)


def by_channel(x: Tensor, bits: int, turn: bool) -> Tensor:
    """As rounded, for keys [tokens, heads, D], with a scale for each channel of GROUP tokens."""
    y = rotate(x.float()) if turn else x.float()
    groups = y.unflatten(0, (-1, GROUP)).transpose(1, -1)
    y = dequantise(*quantise(groups, bits), bits).transpose(1, -1).flatten(0, 1)
    return (rotate(y) if turn else y).to(x.dtype)


def equalised(q: Tensor, k: Tensor, bits: int) -> Tensor:
    """Keys [tokens, kv_heads, D], divided by sqrt(rms of k / rms of q) of each channel, rotated and quantised."""
    by_q = q.float().unflatten(1, (k.shape[1], -1)).square().mean((0, 2)).sqrt()
    by = (k.float().square().mean(0).sqrt() / by_q).sqrt()
    return (rounded(k / by, bits) * by).to(k.dtype)


VARIANTS: dict[str, Callable[[Tensor, Tensor, Tensor, int], Pair]] = {
    "per token, rotated": lambda q, k, v, b: (rounded(k, b), rounded(v, b)),
    "per token, equalised and rotated": lambda q, k, v, b: (equalised(q, k, b), rounded(v, b)),
    "per token": lambda q, k, v, b: (rounded(k, b, False), rounded(v, b, False)),
    "K per channel, rotated": lambda q, k, v, b: (by_channel(k, b, True), rounded(v, b)),
    "K per channel": lambda q, k, v, b: (by_channel(k, b, False), rounded(v, b, False)),
}


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [n, heads, D] to all keys [m, kv_heads, D]: n are the last of them, causal."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k) / math.sqrt(q.shape[-1])
    n, m = len(q), len(k)
    scores = scores.masked_fill(torch.ones(n, m, dtype=torch.bool).triu(m - n + 1), float("-inf"))
    return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v)


def gaussian(factor: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of head size 128.

    Args:
        factor: four channels of the keys are 10 to 30 times the rest, and those of q as much less.
    """
    torch.manual_seed(0)
    q, k, v = torch.randn(64, 8, 128), torch.randn(1024, 2, 128), torch.randn(1024, 2, 128)
    if factor:
        by = torch.ones(128)
        by[torch.randperm(128)[:4]] = torch.linspace(10, 30, 4)
        k, q = k * by, q / by
    return q, k, v


class Seen:
    """Keeps what attention is given; causal attention over one sequence."""

    def __init__(self) -> None:
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []
        self.q: list[Tensor] = []

    def write(self, layer: int, k: Tensor, v: Tensor, step: Step) -> None:
        self.k.append(k)
        self.v.append(v)

    def attend(self, layer: int, q: Tensor, step: Step) -> Tensor:
        self.q.append(q)
        return attention(q, self.k[-1], self.v[-1]).to(q.dtype)


def own_draws(model: Qwen3Moe, ids: Sequence[int]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """q, k, v of each layer for a prompt, the queries of its last 64 tokens."""
    n = len(ids) // GROUP * GROUP
    words = torch.tensor(ids[-n:])
    seen = Seen()
    model(words, seen, model._whole(words[None])[1])
    for q, k, v in zip(seen.q, seen.k, seen.v, strict=True):
        yield q[-64:].float(), k.float(), v.float()


def errors(model: Qwen3Moe, prompt: Sequence[int]) -> dict[str, dict[str, dict[int, float]]]:
    """Relative error of attention's output, by draw, variant and bits; of the model's own keys, the mean of layers."""
    draws = {"tiny model": list(own_draws(model, prompt)), "Gaussian": [gaussian()], "outliers": [gaussian(True)]}
    out: dict[str, dict[str, dict[int, float]]] = {}
    for name, layers in draws.items():
        for variant, change in VARIANTS.items():
            for bits in BITS:
                found = []
                for q, k, v in layers:
                    want = attention(q, k, v)
                    found.append(float((attention(q, *change(q, k, v, bits)) - want).norm() / want.norm()))
                out.setdefault(name, {}).setdefault(variant, {})[bits] = sum(found) / len(found)
    return out


class Uniform(PagedCache):
    """A paged cache whose tokens all go through `change` (x, positions) -> x after the step that wrote them.

    So a piece of a prompt attends to itself in the model's dtype here too, and to the quantised past.

    Attributes:
        equal: [layers, 1, D], what keys are divided by before `change` and multiplied by after it.
    """

    change: Callable[[Tensor, Tensor], Tensor]
    equal: Tensor | None = None
    pending: tuple[Span, ...] = ()

    def prefill(self, *args: Any) -> PrefillStep:
        for span in self.pending:
            at = torch.arange(span.past, span.past + span.n, device=self.k.device)
            pages = self.table[span.row, at // self.page].long()
            for kept, by in ((self.k, self.equal), (self.v, None)):
                x = kept[:, pages, :, at % self.page]
                x = self.change(x, at) if by is None else (self.change((x / by).float(), at) * by).to(x.dtype)
                kept[:, pages, :, at % self.page] = x
        step = super().prefill(*args)
        self.pending = step.spans
        return step


def alternating(budget: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Every token alike: rotated, with the bits of a tier, or of two tiers in turn where the budget lies between."""
    lower = max(b for b in BITS if b <= budget)
    upper = min(b for b in BITS if b >= budget)
    share = (budget - lower) / max(upper - lower, 1)

    def change(x: Tensor, positions: Tensor) -> Tensor:
        more = ((positions + 1) * share).floor() > (positions * share).floor()
        return torch.where(more.view(-1, 1, 1, 1), rounded(x, upper), rounded(x, lower))

    return change


def plain_int4(x: Tensor, positions: Tensor) -> Tensor:
    """16 levels from the least to the most of each vector, not rotated."""
    y = x.float()
    low, high = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True)
    step = ((high - low) / 15).clamp_min(1e-9)
    return (((y - low) / step).round() * step + low).to(x.dtype)


def uniform(sizes: CacheSizes, rows: int, capacity: int, change: Callable[[Tensor, Tensor], Tensor]) -> Uniform:
    cache = Uniform.within(sizes, rows, capacity, page=32)
    assert isinstance(cache, Uniform)
    cache.change = change
    return cache


def caches(sizes: CacheSizes, rows: int, capacity: int) -> Iterator[tuple[str, float, RowCache]]:
    """Name, average bits of a full row, and the cache."""
    yield "bf16", 16, PagedCache.within(sizes, rows, capacity, page=32)
    for budget in BUDGETS:
        yield "bucketed", budget, BucketedCache.within(sizes, rows, capacity, page=32, bits=budget)
        yield "uniform", budget, uniform(sizes, rows, capacity, alternating(budget))
    yield "plain int4", 4, uniform(sizes, rows, capacity, plain_int4)


def run(model: Qwen3Moe, cache: RowCache, asked: Sequence[Sequence[int]], chunk: int) -> list[Tensor]:
    """Logits [n, V] of sequences that run together, in pieces of `chunk` tokens each."""
    out: list[list[Tensor]] = [[] for _ in asked]
    for row, ids in enumerate(asked):
        cache.open(row, len(ids))
    for first in range(0, max(map(len, asked)), chunk):
        pieces = [(row, ids[first : first + chunk]) for row, ids in enumerate(asked) if len(ids) > first]
        words = torch.tensor([i for _, piece in pieces for i in piece])
        step = cache.prefill([(row, len(piece)) for row, piece in pieces], range(len(words)))
        logits = model(words, cache, step).split([len(piece) for _, piece in pieces])
        for (row, _), part in zip(pieces, logits, strict=True):
            out[row].append(part.float().log_softmax(-1))
    for row in range(len(asked)):
        cache.close(row)
    return [torch.cat(parts) for parts in out]


def tasks(model: Qwen3Moe, tokenizer: Any, count: int, chunk: int) -> list[dict[str, Any]]:
    """Of each cache: the share of exact answers, and the divergence of the next token's distribution from bf16's."""
    rows: list[dict[str, Any]] = []
    pieces = {"recall": chunk, "copy": max(1, chunk // 8)}
    contexts: dict[str, dict[str, Any]] = {"recall": {"context": (1080, 1180)}, "copy": {}}
    for task, options in contexts.items():
        n = count if task == "recall" else 4 * count
        pairs = [answer_ids(tokenizer, e) for e in examples(task, "heldout", n, seed="kv", **options)]
        asked = [prompt + answer[:-1] for prompt, answer in pairs]
        capacity = 1216
        wanted: list[Tensor] = []
        for name, bits, cache in caches(model.cache_sizes, len(asked), capacity):
            got = run(model, cache, asked, pieces[task])
            wanted = wanted or got
            right, apart, answers = 0, [], []
            for (prompt, answer), logits, want in zip(pairs, got, wanted, strict=True):
                right += logits[len(prompt) - 1 :].argmax(-1).tolist() == answer
                divergence = (want.exp() * (want - logits)).sum(-1)
                apart.append(divergence[: len(prompt) - 1].mean())
                answers.append(divergence[len(prompt) - 1 :].mean())
            rows.append(
                {
                    "task": task,
                    "cache": name,
                    "bits": bits,
                    "asked": len(pairs),
                    "tokens": sum(map(len, asked)),
                    "right": right,
                    "divergence": float(torch.stack(apart).mean()),
                    "divergence_of_answers": float(torch.stack(answers).mean()),
                }
            )
            typer.echo(json.dumps(rows[-1]))
    return rows


def greedy(model: Qwen3Moe, tokenizer: Any, count: int) -> dict[str, dict[str, int]]:
    """By task: how many answers of a cache of 8 bits are bf16's, token by token."""
    out = {}
    for task in TASKS:
        prompts = [answer_ids(tokenizer, e)[0] for e in examples(task, "heldout", count, seed="greedy")]
        made = [
            generate(model, prompts, max_new_tokens=32, engine=Engine(model, count, 1152, **options)).tokens
            for options in ({}, {"kv": "bucketed", "kv_bits": 8})
        ]
        out[task] = {"asked": count, "equal": sum(a == b for a, b in zip(*made, strict=True))}
        typer.echo(f"{task}: {out[task]}")
    return out


def main(
    out: Annotated[Path | None, typer.Option(help="JSON to write; parts that do not run keep their figures.")] = None,
    part: Annotated[str, typer.Option(help="error, tasks, greedy or all.")] = "all",
    count: Annotated[int, typer.Option(help="Prompts of a task; four times as many of copy.", min=1)] = 16,
    chunk: Annotated[int, typer.Option(help="Tokens of a recall at a time; of a copy an eighth.", min=1)] = 32,
) -> None:
    """Measure, print, and write JSON."""
    if part not in ("error", "tasks", "greedy", "all"):
        raise RequestError("no such part", got=part, expected="error, tasks, greedy or all")
    torch.set_grad_enabled(False)
    model, tokenizer = load_model(TINY, "reference", "cpu"), Tokenizer.from_directory(TINY).fast
    found: dict[str, Any] = json.loads(out.read_text()) if out is not None and out.is_file() else {}
    if part in ("error", "all"):
        (long,) = examples("recall", "heldout", 1, seed="error", context=(990, 1000))
        found["attention"] = errors(model, answer_ids(tokenizer, long)[0])
        for draw, variants in found["attention"].items():
            for variant, by_bits in variants.items():
                typer.echo(f"{draw}, {variant}: " + ", ".join(f"{b} bits {e:.4f}" for b, e in by_bits.items()))
    if part in ("greedy", "all"):
        found["greedy_at_8_bits"] = greedy(model, tokenizer, count)
    if part in ("tasks", "all"):
        found["tasks"] = tasks(model, tokenizer, count, chunk)
        found["chunk"] = {"recall": chunk, "copy": max(1, chunk // 8)}
    if out is not None:
        write(out, found)


if __name__ == "__main__":
    run_script(main)
