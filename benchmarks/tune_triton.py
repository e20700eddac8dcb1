"""Find tiles for ttnn_moe/cuda/tiles.py on this GPU: python benchmarks/tune_triton.py --json tuned.json

Each product is timed alone, in a CUDA graph over rotated weight sets, for every tile that fits; each tile's output is
compared with the first tile's before it is timed. Compiling is spread over processes, which fill Triton's cache.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from ttnn_moe import Experts, Routing
from ttnn_moe.cuda import launch
from ttnn_moe.cuda.tiles import Few, Gemm, Gemv, Sorted

SETS = 4
SHARED_MEMORY = 227 << 10
# rows of a tile -> columns, k, warps, stages to try
SPACE = {
    16: ([32, 64, 128], [64, 128, 256], [4, 8], [3, 4, 5]),
    32: ([32, 64, 128], [64, 128], [4, 8], [3, 4, 5]),
    64: ([64, 128, 256], [64, 128], [4, 8], [3, 4]),
    128: ([64, 128, 256], [32, 64], [4, 8], [3, 4]),
}
FEW_SPACE = ([1, 2, 4, 8, 16], [256, 512, 1024, 2048], [1, 2, 4, 8], [1, 2, 3])


def sizes_of(T: int, E: int, K: int) -> list[int]:
    """Row tiles worth trying."""
    rows = T * K / min(E, T * K)
    return [m for m in SPACE if min(rows / 4, 128) <= m <= max(4 * rows, 16)]


def candidates(m: int, product: str) -> Iterator[Gemm]:
    columns, depths, warps, stages = SPACE[m]
    parts = 2 if product == "gate_up" else 1
    for n, k, w, s, tma in itertools.product(columns, depths, warps, stages, [False, True]):
        held = 2 * s * k * (m + parts * n)
        if held > SHARED_MEMORY or parts * n * m > w * 32 * 160 or parts * n * m < w * 32 * 4:
            continue
        if k * parts * n * s < 64 * 64 * 3:
            continue
        yield Gemm(n, k, w, s, tma)


def experts_of(E: int, H: int, I: int) -> Experts:
    gate_up = torch.empty(E, 2 * I, H, device="cuda", dtype=torch.bfloat16).normal_(std=0.02)
    down = torch.empty(E, H, I, device="cuda", dtype=torch.bfloat16).normal_(std=0.02)
    return Experts.dense(gate_up, down)


class Layer:
    """Inputs of one T: sorted rows, activations, outputs."""

    def __init__(self, T: int, E: int, K: int, H: int, I: int, m: int):
        self.hidden = torch.randn(T, H, device="cuda").bfloat16()
        weights, ids = torch.rand(T, E, device="cuda").topk(K)
        self.routing = Routing.from_topk(ids, weights, E)
        self.rows = launch.sort(launch.Selection.of(self.routing), E, plan_with(m))
        self.act = torch.randn(T * K, I, device="cuda").bfloat16()
        self.activations = torch.empty_like(self.act)
        self.expert_out = torch.empty(T * K, H, device="cuda", dtype=torch.bfloat16)

    def call(self, product: str, experts: Experts, m: int, tile: Gemm) -> torch.Tensor:
        if product == "gate_up":
            launch.gate_up(self.hidden, experts, self.rows, self.activations, m, tile)
            return self.activations
        launch.down(self.act, experts, self.rows, self.expert_out, m, tile)
        return self.expert_out


def plan_with(m: int) -> Sorted:
    tile = Gemm(64, 64, 4, 3)
    return Sorted(m, tile, tile, 4096, 8, 1024)


def measure(calls: list[Callable[[], object]], budget_ms: float = 30) -> float:
    """Median microseconds of one call, from a graph of all of them."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: list[float] = []
    while len(times) < 3 or (sum(times) < budget_ms and len(times) < 25):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:]) / len(calls) * 1e3


def compile_some(work: list[tuple[str, int, Gemm]], sizes: tuple[int, int, int], errors: multiprocessing.Queue) -> None:
    H, I, K = sizes
    experts = experts_of(2, H, I)
    for product, m, tile in work:
        try:
            Layer(64, 2, 2, H, I, m).call(product, experts, m, tile)
            torch.cuda.synchronize()
        except Exception as error:
            errors.put(f"{product} {m} {tile}: {type(error).__name__} {str(error)[:80]}")


def main(
    tokens: str = "16,32,64,128,256,512,1024,2048,4096,16384",
    few_tokens: str = "1,2,4,8",
    experts: int = 128,
    topk: int = 8,
    hidden: int = 2048,
    intermediate: int = 768,
    jobs: int = os.cpu_count() or 1,
    products: str = "gate_up,down",
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Time every tile, print the best of each size, write all times."""
    E, K, H, I = experts, topk, hidden, intermediate
    counts = [int(T) for T in tokens.split(",") if T]
    wanted = {m for T in counts for m in sizes_of(T, E, K)}
    work = [(p, m, tile) for p in products.split(",") for m in sorted(wanted) for tile in candidates(m, p)]
    print(len(work), "tiles", flush=True)
    context = multiprocessing.get_context("spawn")
    errors: multiprocessing.Queue = context.Queue()
    workers = [context.Process(target=compile_some, args=(work[i::jobs], (H, I, K), errors)) for i in range(jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    while not errors.empty():
        print("no:", errors.get())
    torch.manual_seed(0)
    sets = [experts_of(E, H, I) for _ in range(SETS)]
    found: list[dict] = []
    for T in counts:
        for m in sizes_of(T, E, K):
            layer = Layer(T, E, K, H, I, m)
            for product in products.split(","):
                want = None
                best = []
                for tile in candidates(m, product):
                    try:
                        out = layer.call(product, sets[0], m, tile).float()
                        want = out if want is None else want
                        error = float((out - want).norm() / want.norm())
                        if not error < 5e-3:
                            print("WRONG", T, product, m, tile, error, flush=True)
                            continue
                        us = measure([lambda s=s, t=tile: layer.call(product, s, m, t) for s in sets])  # type: ignore[misc]
                    except Exception as failure:
                        print("no:", T, product, m, tile, type(failure).__name__, str(failure)[:60], flush=True)
                        continue
                    best.append((us, tile))
                best.sort(key=lambda pair: pair[0])
                found += [{"T": T, "product": product, "m": m, "us": us, **tile.__dict__} for us, tile in best]
                for us, tile in best[:3]:
                    print(f"T={T} m={m} {product} {us:.1f} {tile}", flush=True)
        found += sort_and_combine(T, E, K, H)
    found += few(few_tokens, sets, E, K, H, I)
    if json_file:
        json_file.write_text(json.dumps(found))


def sort_and_combine(T: int, E: int, K: int, H: int) -> list[dict]:
    """The small kernels around the products."""
    found: list[dict] = []
    weights, ids = torch.rand(T, E, device="cuda").topk(K)
    selection = launch.Selection.of(Routing.from_topk(ids.int(), weights, E))
    for chunk, warps in itertools.product([1024, 2048, 4096, 8192], [4, 8, 16]):
        plan = replace(plan_with(64), sort_chunk=chunk, sort_warps=warps)
        found.append({"T": T, "product": "sort", "chunk": chunk, "warps": warps})
        found[-1]["us"] = measure([lambda p=plan: launch.sort(selection, E, p)] * 4, 5)  # type: ignore[misc]
    rows = launch.sort(selection, E, plan_with(64))
    y, out = (torch.randn(n, H, device="cuda").bfloat16() for n in (T * K, T))
    for block in (256, 512, 1024, 2048):
        call = lambda b=block: launch.combine(y, rows.inverse, selection.weights, None, out, False, b)  # noqa: E731
        found.append({"T": T, "product": "combine", "block_h": block, "us": measure([call] * 4, 5)})
    for product in ("sort", "combine"):
        best = sorted((row for row in found if row["product"] == product), key=lambda row: row["us"])
        print([{k: round(v, 1) if k == "us" else v for k, v in row.items()} for row in best[:3]], flush=True)
    return found


def few(few_tokens: str, sets: list[Experts], E: int, K: int, H: int, I: int) -> list[dict]:
    """The path without a sort: one product at a time, the other at a fixed tile."""
    found = []
    for T in (int(T) for T in few_tokens.split(",") if T):
        layer = Layer(T, E, K, H, I, 16)
        selection = launch.Selection.of(layer.routing)
        out = torch.empty(T, H, device="cuda", dtype=torch.bfloat16)
        fixed = Gemv(4, 512, 4, 1)
        for product in ("gate_up", "down"):
            best = []
            for n, k, w, s in itertools.product(*FEW_SPACE):
                if not w * 32 * 4 <= n * k <= w * 32 * 64 or k > 2 * I and product == "down":
                    continue
                if product == "gate_up" and s > 1 and T > 1:
                    continue
                tile = Gemv(n, k, w, s)
                plan = Few(tile, fixed) if product == "gate_up" else Few(fixed, tile)
                us = measure(
                    [
                        lambda x=x, p=plan: launch.few(layer.hidden, x, selection, layer.act, out, False, p)
                        for x in sets
                    ],
                    5,
                )  # type: ignore[misc]
                best.append((us, tile))
            best.sort(key=lambda pair: pair[0])
            found += [{"T": T, "product": "few " + product, "us": us, **tile.__dict__} for us, tile in best]
            for us, tile in best[:4]:
                print(f"T={T} few {product} {us:.1f} {tile}", flush=True)
            fixed = best[0][1]
    return found


if __name__ == "__main__":
    typer.run(main)
