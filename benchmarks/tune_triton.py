"""Find tiles for ttnn_moe/cuda/moe/triton_tiles.py on this GPU.

    PYTHONPATH=. python benchmarks/tune_triton.py --json tuned.json

Each product is timed alone, in a CUDA graph over rotated weight sets, for every tile that fits. Before its time, every
tile fills outputs that held POISON, and tune_checks.py compares them with fp64; what is wrong has no time. Compiling is
spread over processes, which fill Triton's cache.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

import torch
from command_line import Json, run_script, write
from need_gpu import need_gpu
from tune_checks import combined, products, sort_is_wrong

from ttnn_moe import Experts, Routing
from ttnn_moe.cuda.moe import triton_launch as launch
from ttnn_moe.cuda.moe.family import Call
from ttnn_moe.cuda.moe.triton_tiles import FewTiles, SortedTiles, TritonTile
from ttnn_moe.errors import TtnnMoeError
from ttnn_moe.selfcheck.bounds import BOUND, POISON, poisoned, worst_error
from ttnn_moe.selfcheck.oracle import oracle

SETS, DEVICE = 4, "cuda"
SHARED_MEMORY = 227 << 10
# rows of a tile -> columns, k, warps, stages to try
SPACE = {
    16: ([32, 64, 128], [64, 128, 256], [4, 8], [3, 4, 5]),
    32: ([32, 64, 128], [64, 128], [4, 8], [3, 4, 5]),
    64: ([64, 128, 256], [64, 128], [4, 8], [3, 4]),
    128: ([64, 128, 256], [32, 64], [4, 8], [3, 4]),
}
FEW_SPACE = ([1, 2, 4, 8, 16], [256, 512, 1024, 2048], [1, 2, 4, 8], [1, 2, 3])
ANY = TritonTile(64, 64, 4, 3)


def row_tiles(T: int, E: int, K: int) -> list[int]:
    """Row tiles worth trying."""
    rows = T * K / min(E, T * K)
    return [m for m in SPACE if min(rows / 4, 128) <= m <= max(4 * rows, 16)]


def candidates(m: int, product: str) -> Iterator[TritonTile]:
    """Tiles that fit in shared memory and registers, and are not far too small."""
    parts = 2 if product == "gate_up" else 1
    for n, k, warps, stages in itertools.product(*SPACE[m]):
        held, sums = 2 * stages * k * (m + parts * n), parts * n * m
        if held <= SHARED_MEMORY and warps * 32 * 4 <= sums <= warps * 32 * 160 and k * parts * n * stages >= 12288:
            yield TritonTile(n, k, warps, stages)


def experts_of(E: int, H: int, I: int) -> Experts:
    gate_up = torch.empty(E, 2 * I, H, device=DEVICE, dtype=torch.bfloat16).normal_(std=0.02)
    down = torch.empty(E, H, I, device=DEVICE, dtype=torch.bfloat16).normal_(std=0.02)
    return Experts.dense(gate_up, down)


class Layer:
    """Inputs of one T: sorted rows, activations, outputs."""

    def __init__(self, T: int, E: int, K: int, H: int, I: int, m: int):
        self.hidden = torch.randn(T, H, device=DEVICE).bfloat16()
        weights, ids = torch.rand(T, E, device=DEVICE).topk(K)
        self.routing = Routing.from_topk(ids.int(), weights, E)
        self.rows = self.sort(m, 4096)
        self.act = torch.randn(T * K, I, device=DEVICE).bfloat16()
        self.activations = torch.empty_like(self.act)
        self.expert_out = torch.randn(T * K, H, device=DEVICE).bfloat16()

    def sort(self, m: int, chunk: int, poison: bool = False) -> launch.SortedRows:
        """poison: to memory that held -POISON, which no place, row, expert or token is."""
        tiles, E = SortedTiles(m, ANY, ANY, sort_chunk=chunk), self.routing.E
        words = launch.sort_words(self.routing.topk_ids.numel(), E, tiles)
        memory = torch.empty(words, dtype=torch.int32, device=DEVICE)
        if poison:
            memory.fill_(-int(POISON))
        return launch.sort(self.routing, None, E, tiles, memory)

    def call(self, product: str, m: int, tile: TritonTile, experts: Experts) -> torch.Tensor:
        if product == "gate_up":
            launch.gate_up(self.hidden, experts, self.rows, self.activations, m, tile)
            return self.activations
        launch.down(self.act, experts, self.rows, self.expert_out, m, tile)
        return self.expert_out

    def wanted(self, product: str, experts: Experts) -> torch.Tensor:
        """What call gives, by sorted row."""
        return products(product, self.hidden, self.act, self.routing, self.rows.inverse, experts)


def error_of(outputs: list[torch.Tensor], call: Callable[[], object], wanted: list[torch.Tensor]) -> float:
    """The largest relative error of a row, after outputs were filled with POISON."""
    for out in outputs:
        out.fill_(POISON)
    call()
    return max(worst_error(out, want) for out, want in zip(outputs, wanted, strict=True))


def right(error: float, *what: object) -> bool:
    """Whether an error is within the bound of bf16; else say it."""
    if not error <= BOUND[torch.bfloat16]:
        print("WRONG", *what, error, flush=True)
        return False
    return True


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


def compile_some(
    work: list[tuple[str, int, TritonTile]], sizes: tuple[int, int], errors: multiprocessing.Queue
) -> None:
    H, I = sizes
    experts = experts_of(2, H, I)
    for product, m, tile in work:
        try:
            Layer(64, 2, 2, H, I, m).call(product, m, tile, experts)
            torch.cuda.synchronize()
        except Exception as error:
            errors.put(f"{product} {m} {tile}: {type(error).__name__} {str(error)[:80]}")


def compile_all(work: list[tuple[str, int, TritonTile]], sizes: tuple[int, int], jobs: int) -> None:
    context = multiprocessing.get_context("spawn")
    errors: multiprocessing.Queue = context.Queue()
    workers = [context.Process(target=compile_some, args=(work[i::jobs], sizes, errors)) for i in range(jobs)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    while not errors.empty():
        print("no:", errors.get())


def products_of(T: int, m: int, layer: Layer, product: str, sets: list[Experts]) -> list[dict]:
    """Times of every tile of one product, the fastest first."""
    want = layer.wanted(product, sets[0])
    out = layer.activations if product == "gate_up" else layer.expert_out
    found: list[dict] = []
    for tile in candidates(m, product):
        call = partial(layer.call, product, m, tile)
        try:
            if not right(error_of([out], partial(call, sets[0]), [want]), T, product, m, tile):
                continue
            us = measure([partial(call, s) for s in sets])
        except Exception as failure:
            print("no:", T, product, m, tile, type(failure).__name__, str(failure)[:60], flush=True)
            continue
        found.append({"T": T, "product": product, "m": m, "us": us, **asdict(tile)})
    found.sort(key=lambda row: row["us"])
    return found


def sort_and_combine(T: int, E: int, K: int, H: int) -> list[dict]:
    """The small kernels around the products."""
    layer = Layer(T, E, K, H, 16, 64)
    sort: list[dict] = []
    for chunk in (1024, 2048, 4096, 8192):
        why = sort_is_wrong(layer.routing, layer.sort(64, chunk, poison=True), 64)
        if why is not None:
            print("WRONG", T, "sort", chunk, why, flush=True)
            continue
        us = measure([partial(layer.sort, 64, chunk)] * 4, 5)
        sort.append({"T": T, "product": "sort", "us": us, "chunk": chunk})
    out = poisoned(T, H, dtype=torch.bfloat16, device=DEVICE)
    want = combined(layer.expert_out, layer.rows.inverse, layer.routing)
    combine: list[dict] = []
    for block in (256, 512, 1024, 2048):
        arguments = (layer.expert_out, layer.rows.inverse, layer.routing.topk_weights, None, out, False, block)
        if not right(error_of([out], partial(launch.combine, *arguments), [want]), T, "combine", block):
            continue
        us = measure([partial(launch.combine, *arguments)] * 4, 5)
        combine.append({"T": T, "product": "combine", "us": us, "block_h": block})
    return sorted(sort, key=lambda row: row["us"]) + sorted(combine, key=lambda row: row["us"])


def few(T: int, sets: list[Experts], E: int, K: int, H: int, I: int) -> list[dict]:
    """The path without a sort, whole; one product's tile at a time, the other's fixed."""
    layer = Layer(T, E, K, H, I, 16)
    outs = [poisoned(T, H, dtype=torch.bfloat16, device=DEVICE) for _ in sets]
    calls = [Call(layer.hidden, layer.routing, x, out, False) for x, out in zip(sets, outs, strict=True)]
    wanted = [oracle(layer.hidden, layer.routing.topk_ids, layer.routing.topk_weights, x) for x in sets]
    fixed = TritonTile(4, 512, 4, 1)
    found: list[dict] = []
    for product in ("gate_up", "down"):
        rows: list[dict] = []
        for n, k, warps, stages in itertools.product(*FEW_SPACE):
            if not warps * 32 * 4 <= n * k <= warps * 32 * 64 or (k > 2 * I and product == "down"):
                continue
            tile = TritonTile(n, k, warps, stages)
            tiles = FewTiles(tile, fixed) if product == "gate_up" else FewTiles(fixed, tile)
            runs = [partial(launch.few, call, layer.act, tiles) for call in calls]
            layer.act.fill_(POISON)
            if not right(error_of(outs, lambda runs=runs: [run() for run in runs], wanted), T, "few", product, tile):
                continue
            us = measure(runs, 5)
            rows.append({"T": T, "product": "few " + product, "us": us, **asdict(tile)})
        if not rows:
            raise TtnnMoeError(f"the gate is shut: no tile of {product} gives right results for {T} tokens")
        rows.sort(key=lambda row: row["us"])
        fixed = TritonTile(*(rows[0][name] for name in ("n", "k", "warps", "stages")))
        found += rows
    return found


def main(
    tokens: str = "16,32,64,128,256,512,1024,2048,4096,16384",
    few_tokens: str = "1,2,4,8",
    experts: int = 128,
    topk: int = 8,
    hidden: int = 2048,
    intermediate: int = 768,
    jobs: int = os.cpu_count() or 1,
    products: str = "gate_up,down",
    json_file: Json = None,
) -> None:
    """Time every tile, print the best of each size, write all times."""
    need_gpu()
    E, K, H, I = experts, topk, hidden, intermediate
    counts = [int(T) for T in tokens.split(",") if T]
    chosen = [p for p in products.split(",") if p]
    wanted = sorted({m for T in counts for m in row_tiles(T, E, K)})
    compile_all([(p, m, tile) for p in chosen for m in wanted for tile in candidates(m, p)], (H, I), jobs)
    torch.manual_seed(0)
    sets = [experts_of(E, H, I) for _ in range(SETS)]
    found: list[dict] = []

    def keep(rows: list[dict], best: int = 3) -> None:
        for row in rows[:best]:
            print({name: round(value, 1) if name == "us" else value for name, value in row.items()}, flush=True)
        found.extend(rows)
        if json_file:
            write(json_file, found)

    for T in counts:
        for m in row_tiles(T, E, K):
            layer = Layer(T, E, K, H, I, m)
            for product in chosen:
                keep(products_of(T, m, layer, product, sets))
        keep(sort_and_combine(T, E, K, H), 8)
    for T in (int(T) for T in few_tokens.split(",") if T):
        keep(few(T, sets, E, K, H, I))


if __name__ == "__main__":
    run_script(main)
