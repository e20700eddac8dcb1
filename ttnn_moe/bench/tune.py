"""`ttnn-moe bench --tune`: time the tiles that a CUDA C++ family has, and keep the fastest for this machine's plans.

A fault of a kernel spoils its process. So each tile first runs once in a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from ..cuda.arch import target_of
from ..cuda.jit import load
from ..cuda.moe import cuda_cpp, tuned
from ..cuda.moe.families import FAMILIES, choose
from ..cuda.moe.sorted import Sorted, SortedPlan, Tile
from ..cuda.moe.uses import Use
from ..errors import RequestError
from ..selfcheck.apart import call_apart
from ..visible import visible
from .families import OfFamily
from .floor import measure_ceilings
from .layer import Layer, Weights
from .measure import Options, Point, Result, measure_layer

GAIN = 0.98
"""A tile replaces the family's own choice where its time is at most this part of it."""


class WithTile(OfFamily):
    """A family with one tile, whatever its plan would choose, at some numbers of tokens."""

    family: Sorted[Any]

    def __init__(self, family: Sorted[Any], tile: Tile, tokens: Iterable[int]):
        super().__init__(family, name_of(tile))
        self.tile, self.tokens = tile, set(tokens)

    def why_not(self, layer: Layer, T: int) -> str | None:
        return None if T in self.tokens else "not asked for"

    def plan(self, layer: Layer, T: int) -> SortedPlan[Any]:
        return self.family.plan_of(layer.problem(T, "cuda"), cuda_cpp.arch_of(self.target()), self.tile)

    def uses(self, layer: Layer) -> Iterable[Use]:
        """Its kernels."""
        for T in self.tokens:
            yield from self.family.uses(self.plan(layer, T), ids64=False, add=False)


def name_of(tile: Tile) -> str:
    return "tile " + ",".join(str(int(value)) for value in asdict(tile).values())


def compile_all(layer: Layer, asked: Sequence[WithTile]) -> None:
    """Compile and load the kernels of tiles on the current GPU, several at a time."""
    device = torch.cuda.current_device()
    kernels = {(use.spec, use.shared_memory) for one in asked for use in one.uses(layer)}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda kernel: load.kernel(kernel[0], device, kernel[1]), kernels))


SECONDS = 300.0
"""A tile has so long for its first calls: one that hangs is left out."""


def run_once(layer: Layer, one: WithTile, device: int) -> None:
    """One call of a tile with each of its numbers of tokens, on few experts of the layer.

    Raises:
        RuntimeError: a call left the device with a fault.
    """
    torch.cuda.set_device(device)
    layer = replace(layer, E=min(layer.E, max(layer.K, 8)))
    weights = Weights.random(layer, "cuda", 0)
    for T in sorted(one.tokens):
        ids = torch.rand(T, layer.E, device="cuda").topk(layer.K).indices.int()
        hidden, scale = torch.randn(T, layer.H, device="cuda").to(layer.dtype), torch.ones(ids.shape, device="cuda")
        one.prepare(layer, weights, T)(hidden, ids, scale)
        torch.cuda.synchronize()


def sound(layer: Layer, asked: Sequence[WithTile], console: Console) -> list[WithTile]:
    """Those tiles that run; the others are named, with their faults."""
    kept, device = [], torch.cuda.current_device()
    for number, one in enumerate(asked, 1):
        with console.status(f"first calls of {one.name}, {number} of {len(asked)}"):
            try:
                call_apart(SECONDS, run_once, layer, one, device)
                kept.append(one)
                continue
            except RuntimeError as failure:
                told = f"left out: {one.family.name}, {one.name}: {' '.join(str(failure).split())[:300]}"
        console.print(told, highlight=False, markup=False)
    return kept


@dataclass(frozen=True)
class Found:
    """The fastest tile of one number of tokens, and the time of the family's own choice, in microseconds; inf: that
    failed."""

    point: Point
    own: Tile
    own_us: float
    best: Tile
    best_us: float

    @property
    def better(self) -> bool:
        return self.best_us <= GAIN * self.own_us


def tune(layer: Layer, points: Sequence[Point], options: Options, console: Console) -> list[Found]:
    """Time every tile of the families that run these numbers of tokens; keep those that beat the families' choice.

    Tiles that fault, and results that fail the benchmark's gate, count for nothing. What is kept replaces what was kept
    for the same sizes, also what was kept for the other kind of routing: plans know the number of tokens alone.

    Raises:
        RequestError: a number of tokens has both kinds of routing, no family that runs them has tiles to choose from,
            or nothing could be timed.
        typer.Exit: the device was lost on the way; the tiles found until then are kept.
    """
    points = sorted(set(points), key=lambda point: point.T)
    both = [str(one.T) for one, other in zip(points, points[1:], strict=False) if one.T == other.T]
    if both:
        raise RequestError(
            "a number of tokens can keep one tile only",
            got=f"uniform and skewed routing for {', '.join(both)} tokens",
            expected="one of the two, as in 1,32,4096s",
        )
    target, reasons = target_of(), []
    asked: dict[tuple[Sorted[Any], Tile], WithTile] = {}
    for T in [point.T for point in points]:
        chosen = choose(layer.problem(T, "cuda"), target, FAMILIES)
        if isinstance(chosen, str) or not isinstance(chosen.family, Sorted) or target.arch is None:
            reasons.append(f"T={T}: {chosen if isinstance(chosen, str) else f'{chosen.family.name} has one form'}")
            continue
        family, arch = chosen.family, target.arch
        for tile in dict.fromkeys([family.tile(layer.problem(T, "cuda"), arch), *family.candidates(arch)]):
            asked.setdefault((family, tile), WithTile(family, tile, ())).tokens.add(T)
    if not asked:
        raise RequestError(
            "there are no tiles to choose from",
            got="; ".join(reasons) or "no numbers of tokens",
            expected="--tokens that a family with tiles runs (ttnn-moe why shows the families)",
        )
    for reason in reasons:
        console.print(f"not tuned: {reason}", highlight=False, markup=False)
    made = list(asked.values())
    with console.status(f"compiling kernels of {len(made)} tiles"):
        compile_all(layer, made)
    made = sound(layer, made, console)
    ceilings, result, found = measure_ceilings("cuda", layer.dtype), Result(), []
    points = [point for point in points if any(point.T in one.tokens for one in made)]
    if points:
        measure_layer(layer, points, made, ceilings, options, result)
    for point in points:
        T = point.T
        rows = {r["implementation"]: r for r in result.rows if (r["T"], r["mode"], r["status"]) == (T, "graph", "ok")}
        times = {one: rows[one.name]["median_us"] for one in made if T in one.tokens and one.name in rows}
        if times:
            best = min(times, key=times.__getitem__)
            own = best.family.tile(layer.problem(T, "cuda"), arch)
            own_us = next((us for one, us in times.items() if one.tile == own), float("inf"))
            found.append(Found(point, own, own_us, best.tile, times[best]))
    if not found:
        told = sorted({str(row["reason"]) for row in result.rows if row["status"] != "ok"})
        raise RequestError("nothing could be timed", got="; ".join(told) or str(result.stopped or "no tile that runs"))
    taken = [(layer.problem(one.point.T, "cuda"), one.best if one.better else one.own) for one in found]
    where = tuned.keep(target, taken)
    _print(found, where, console)
    if result.stopped is not None:
        typer.echo(visible(f"ttnn-moe: not everything could be tuned: stopped: {result.stopped}"), err=True)
        raise typer.Exit(1)
    return found


def _print(found: Sequence[Found], where: str | None, console: Console) -> None:
    table = Table("T", "own choice", "us", "fastest", "us", "plans now take")
    for one in found:
        taken = name_of(one.best if one.better else one.own)
        table.add_row(
            str(one.point),
            name_of(one.own),
            f"{one.own_us:.1f}" if one.own_us < float("inf") else "failed",
            name_of(one.best),
            f"{one.best_us:.1f}",
            taken,
        )
    console.print(table)
    if where is not None:
        console.print(f"kept in {where}; plans of new processes take it. Remove the file to undo.", highlight=False)
