"""Long associative recalls through quantised KV caches: exact answers, and the divergence from bf16's distribution.

    python -m ttnn_moe.models.qwen3.tiny.train_long --out DIR
    PYTHONPATH=.:benchmarks python benchmarks/kv_recall.py --model DIR --json benchmarks/results/kv_recall.json

A prompt lists pairs of near-duplicate keys and values, then asks for many of them, with right answers in between.
--gain G multiplies two pairs of channels of each key by G and of each query by 1 / G: outliers, and the same model.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
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


def main(
    model: Annotated[Path, typer.Option(help="The checkpoint that train_long wrote.")],
    prompts: Annotated[int, typer.Option(help="Rows of pairs.")] = 2,
    length: Annotated[int, typer.Option(help="Tokens of a row.")] = 8192,
    letters: Annotated[int, typer.Option(help="Of a key.")] = 6,
    family: Annotated[int, typer.Option(help="Keys that differ in one letter.")] = 20,
    skew: Annotated[list[float] | None, typer.Option(help="The n-th pair is asked in proportion to n^-skew.")] = None,
    gain: Annotated[list[float] | None, typer.Option(help="Of the outlier channels of keys.")] = None,
    piece: Annotated[int, typer.Option(help="Tokens of a piece of the pairs.")] = 2048,
    chunk: Annotated[int, typer.Option(help="Tokens of a piece of the questions.")] = 128,
    budgets: Annotated[str, typer.Option(help="Average bits, a list.")] = ",".join(f"{b:g}" for b in BUDGETS),
    only: Annotated[str, typer.Option(help="Names of caches, a list; bf16 always runs.")] = "",
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda" if torch.cuda.is_available() else "cpu",
    json_file: Annotated[Path | None, typer.Option("--json", help="File to write.")] = None,
) -> None:
    """Measure, print, and write JSON."""
    torch.set_grad_enabled(False)
    found: dict[str, Any] = {"tokens": length, "prompts": prompts, "letters": letters, "family": family}
    found |= {"piece": piece, "chunk": chunk, "device": device, "cases": []}
    for by in gain or [1.0]:
        loaded = load_model(model, "auto" if device == "cuda" else "reference", device, torch.bfloat16)
        assert isinstance(loaded, Qwen3Moe)
        outliers(loaded, by)
        for s in skew or [0.0]:
            pairs = Pairs(letters, family, skew=s)
            rows = pairs.rows(prompts, length, torch.Generator().manual_seed(10**6))
            width, told = pairs.width, int((rows[1][0] == 3).nonzero()[0, 0]) - letters - 1
            end = length // width * width
            pieces = [min(piece, told - at) for at in range(0, told, piece)]
            pieces += [min(chunk, end - at) for at in range(told, end, chunk)]
            base: list[Tensor] = []
            for name, bits, make in caches(loaded, length, [float(b) for b in budgets.split(",")]):
                if only and name != "bf16" and name not in only.split(","):
                    continue
                start, right, apart = time.monotonic(), [], []
                for n, (ids, kinds) in enumerate(zip(*rows, strict=True)):
                    at = (kinds[1:end] == 3).nonzero().flatten()
                    got = log_probabilities(loaded, make(), ids[:end].to(device), pieces).cpu()[at]
                    if name == "bf16":
                        base.append(got)
                    right.append((got.argmax(-1) == ids[1:][at]).view(-1, DIGITS).all(-1))
                    apart.append((base[n].exp() * (base[n] - got)).sum(-1))
                case = {"gain": by, "skew": s, "cache": name, "bits": bits, "asked": sum(map(len, right))}
                case |= {"right": int(torch.cat(right).sum()), "divergence": float(torch.cat(apart).mean())}
                case["each"] = [[int(r.sum()), float(a.mean())] for r, a in zip(right, apart, strict=True)]
                found["cases"].append(case)
                typer.echo(json.dumps({**case, "each": len(right), "s": round(time.monotonic() - start, 1)}))
                if json_file is not None:
                    json_file.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
