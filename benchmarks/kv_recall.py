"""Long associative recalls through quantised KV caches: exact answers, and the divergence from bf16's distribution.

    python -m ttnn_moe.models.qwen3.tiny.train_long --out DIR
    PYTHONPATH=.:benchmarks python benchmarks/kv_recall.py --model DIR --json benchmarks/results/kv_recall.json

A prompt lists pairs of near-duplicate keys and values, then asks for many of them, with right answers in between.
--gain G multiplies two pairs of channels of each key by G and of each query by 1 / G: outliers, and the same model.
--shown N asks N questions at the end of each piece of the pairs, too, so that their importance shows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from command_line import Json, run_script, write
from kv_quality import BUDGETS, Uniform, alternating, plain_int4
from torch import Tensor

from ttnn_moe.kv.cache import RowCache
from ttnn_moe.models.qwen3 import Qwen3Moe, load_model
from ttnn_moe.models.qwen3.tiny.pairs import DIGITS, Pairs

PAGE = 64


def caches(model: Qwen3Moe, length: int, budgets: list[float]) -> Iterator[tuple[str, float, Callable[[], RowCache]]]:
    """Name, average bits of a full row, and what makes the cache."""
    sizes = model.cache_sizes

    def even(change: Callable[[Tensor, Tensor], Tensor], equal: bool) -> RowCache:
        cache = Uniform.within(sizes, 1, length, page=PAGE)
        assert isinstance(cache, Uniform)
        cache.change = change
        if equal:
            cache.equal = (model._norms("k_norm") / model._norms("q_norm")).sqrt()[:, None]
        return cache

    yield "bf16", 16, lambda: model.new_cache(1, length, page=PAGE)
    for b in budgets:
        yield "bucketed", b, lambda b=b: model.new_cache(1, length, page=PAGE, kv="bucketed", kv_bits=b)
        yield "uniform", b, lambda b=b: even(alternating(b), True)
        yield "uniform (not equalised)", b, lambda b=b: even(alternating(b), False)
    yield "plain int4", 4, lambda: even(plain_int4, False)


def log_probabilities(model: Qwen3Moe, cache: RowCache, ids: Tensor, pieces: list[int]) -> Tensor:
    """[n, V] fp32 of one sequence that runs in these pieces."""
    out, first = [], 0
    cache.open(0, len(ids))
    for n in pieces:
        step = cache.prefill([(0, n)], range(n))
        out.append(model(ids[first : first + n], cache, step).float().log_softmax(-1))
        first += n
    cache.close(0)
    return torch.cat(out)


def outliers(model: Qwen3Moe, gain: float) -> None:
    """Multiply channels 1, 9 and their RoPE partners of keys by `gain`, those of queries by 1 / gain."""
    for name, module in model.named_modules():
        if name.endswith((".attention.k_norm", ".attention.q_norm")):
            weight: Any = module.weight
            half = len(weight) // 2
            for i in (1, 9, half + 1, half + 9):
                weight[i] *= gain if name.endswith("k_norm") else 1 / gain


@dataclass(frozen=True)
class Recall:
    """What every row of a run has: the checkpoint, the device, and the options of the same names below."""

    model: Path
    device: str
    length: int
    letters: int
    family: int
    piece: int
    chunk: int
    budgets: tuple[float, ...]
    only: tuple[str, ...]

    def prompt(self, row: int, rows: int, skew: float, shown: int) -> tuple[Tensor, Tensor, list[int]]:
        """ids [n] of a row; where its answers begin; the pieces that it runs in."""
        pairs = Pairs(self.letters, self.family, skew=skew)
        ids, kinds = (x[row] for x in pairs.rows(rows, self.length, torch.Generator().manual_seed(10**6)))
        width = pairs.width
        whole = ids[: self.length // width * width].view(-1, width)
        new = int((kinds == 3).nonzero()[0, 0]) // width
        if shown:
            whole, ends = self._asked_early(whole[:new], len(whole), skew, shown, row)
        else:
            ends = [min(at + self.piece, new * width) for at in range(0, new * width, self.piece)]
        told, end = ends[-1], len(whole) * width
        pieces = [b - a for a, b in zip([0, *ends], ends, strict=False)]
        pieces += [min(self.chunk, end - at) for at in range(told, end, self.chunk)]
        at = torch.arange(told, end, width)[:, None] + self.letters + 1 + torch.arange(DIGITS)
        return whole.flatten(), at.flatten(), pieces

    def _asked_early(self, told: Tensor, count: int, skew: float, shown: int, seed: int) -> tuple[Tensor, list[int]]:
        """Pairs [count, width]: pieces of new ones and `shown` questions about them, then questions. Ends of pieces."""
        generator, (new, width) = torch.Generator().manual_seed(seed), told.shape
        # ranks in any order: the first pairs are in the cache's high tier
        odds = (torch.randperm(new, generator=generator) + 1).float() ** -skew
        parts, ends, step = [], [], self.piece // width - shown
        for a in range(0, new, step):
            b = min(new, a + step)
            asked = a + torch.multinomial(odds[a:b], shown, True, generator=generator)
            parts += [told[a:b], told[asked]]
            ends.append(sum(map(len, parts)) * width)
        asked = torch.multinomial(odds, count - ends[-1] // width, True, generator=generator)
        return torch.cat((*parts, told[asked])), ends

    def run(
        self, row: int, rows: int, skew: float, shown: int, gain: float
    ) -> list[tuple[str, float, int, int, float]]:
        """Of each cache: its name and bits; right answers, questions, and divergence from bf16's cache."""
        torch.set_grad_enabled(False)
        loaded = load_model(self.model, "auto" if self.device == "cuda" else "reference", self.device, torch.bfloat16)
        assert isinstance(loaded, Qwen3Moe)
        outliers(loaded, gain)
        ids, at, pieces = self.prompt(row, rows, skew, shown)
        found, base = [], None
        for name, bits, make in caches(loaded, self.length, list(self.budgets)):
            if self.only and name not in ("bf16", *self.only):
                continue
            got = log_probabilities(loaded, make(), ids.to(self.device), pieces).cpu()[at - 1]
            base = got if base is None else base
            right = (got.argmax(-1) == ids[at]).view(-1, DIGITS).all(-1)
            apart = float((base.exp() * (base - got)).sum(-1).mean())
            found.append((name, bits, int(right.sum()), len(right), apart))
        return found


def main(
    model: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Checkpoint of train_long.")],
    prompts: Annotated[int, typer.Option(help="Rows of pairs.")] = 2,
    length: Annotated[int, typer.Option(help="Tokens of a row.")] = 8192,
    letters: Annotated[int, typer.Option(help="Of a key.")] = 6,
    family: Annotated[int, typer.Option(help="Keys that differ in one letter.")] = 20,
    skew: Annotated[list[float] | None, typer.Option(help="The n-th pair is asked in proportion to n^-skew.")] = None,
    shown: Annotated[
        list[int] | None, typer.Option(help="Early questions of a piece: none, or one number a skew.")
    ] = None,
    gain: Annotated[list[float] | None, typer.Option(help="Of the outlier channels of keys.")] = None,
    piece: Annotated[int, typer.Option(help="Tokens of a piece of the pairs.")] = 2048,
    chunk: Annotated[int, typer.Option(help="Tokens of a piece of the questions.")] = 128,
    budgets: Annotated[str, typer.Option(help="Average bits, a list.")] = ",".join(f"{b:g}" for b in BUDGETS),
    only: Annotated[str, typer.Option(help="Names of caches, a list; bf16 always runs.")] = "",
    processes: Annotated[int, typer.Option(help="Rows at a time.")] = 1,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda" if torch.cuda.is_available() else "cpu",
    json_file: Json = None,
) -> None:
    """Measure, print, and write JSON."""
    skews = skew or [0.0]
    early = shown or [0] * len(skews)
    if len(early) != len(skews):
        raise typer.BadParameter(f"got {len(early)} values of --shown and {len(skews)} of --skew; give as many")
    recall = Recall(
        model,
        device,
        length,
        letters,
        family,
        piece,
        chunk,
        tuple(map(float, budgets.split(","))),
        tuple(filter(None, only.split(","))),
    )
    found: dict[str, Any] = {"tokens": length, "prompts": prompts, "letters": letters, "family": family}
    found |= {"piece": piece, "chunk": chunk, "device": device, "cases": []}
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for by in gain or [1.0]:
            for s, n in zip(skews, early, strict=True):
                start = time.monotonic()
                jobs = [pool.submit(recall.run, row, prompts, s, n, by) for row in range(prompts)]
                for same in zip(*(job.result() for job in jobs), strict=True):
                    (name, bits, *_), each = same[0], [[right, apart] for *_, right, _, apart in same]
                    case = {"gain": by, "skew": s, "cache": name, "bits": bits, "asked": sum(row[3] for row in same)}
                    case |= {"shown": n} if n else {}
                    case |= {"right": sum(right for right, _ in each)}
                    case |= {"divergence": sum(apart for _, apart in each) / prompts, "each": each}
                    found["cases"].append(case)
                    typer.echo(json.dumps({**case, "each": prompts}))
                typer.echo(f"{time.monotonic() - start:.0f} s")
                if json_file is not None:
                    write(json_file, found)


if __name__ == "__main__":
    run_script(main)
