"""Measure a layer at several numbers of tokens. An implementation that fails is recorded, and ends no run."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .attempt import Attempt, DeviceLost, attempt, warm_up
from .draw import Draw
from .floor import Ceilings, floor
from .gate import Inputs
from .implementations import Implementation
from .layer import Layer, Weights, fit, free_bytes
from .timing import clock_for, take_turns

CALLS = 48
"""Calls of a graph of FEW tokens: as many as Qwen3-30B-A3B has layers, which one graph holds, too."""
FEW = 4


@dataclass(frozen=True)
class Point:
    """A number of tokens, routed uniformly or skewed."""

    T: int
    skewed: bool = False

    def __str__(self) -> str:
        return f"{self.T} skewed" if self.skewed else str(self.T)


@dataclass
class Options:
    """How to measure.

    Attributes:
        device: "cuda" or "cpu".
        rounds: samples of a row, at most; at least ten (or rounds) are taken.
        seconds: about how long the rounds of one point may take.
        sets: weight sets that are rotated.
        seed: of weights and draws.
        cut_experts: where not all experts fit, measure as many as do.
        deadline: time.monotonic() after which no point is begun.
        say: told a line of progress.
    """

    device: str
    rounds: int = 100
    seconds: float = 3.0
    sets: int = 4
    seed: int = 0
    cut_experts: bool = False
    deadline: float = float("inf")
    say: Callable[[str], object] = lambda line: None


@dataclass
class Result:
    """layers: sizes, weight sets and draws with their floors; rows: one a point, implementation and mode; stopped: why
    the run ended early, if it did."""

    layers: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    stopped: str | None = None


def measure_layer(
    layer: Layer,
    points: Sequence[Point],
    implementations: Sequence[Implementation],
    ceilings: Ceilings,
    options: Options,
    result: Result,
    save: Callable[[], object] = lambda: None,
) -> None:
    """Measure a layer at every point; result grows, and save() is called, after each.

    Raises:
        RequestError: the weights do not fit; nothing was allocated.
    """
    E_of_the_model, free = layer.E, free_bytes(options.device)
    layer, n_sets = fit(layer, max(point.T for point in points), free, options.sets, options.cut_experts)
    described: dict[str, Any] = {
        "name": layer.name,
        "E": layer.E,
        "K": layer.K,
        "H": layer.H,
        "I": layer.I,
        "dtype": str(layer.dtype).removeprefix("torch."),
        "weight_format": layer.weight_format,
        "gate_up_order": layer.gate_up_order,
        "activation": layer.activation,
        "biased": layer.biased,
        "E_of_the_model": E_of_the_model,
        "sets": n_sets,
        "set_bytes": layer.set_bytes,
        "free_bytes": free,
        "draws": [],
    }
    result.layers.append(described)
    sets = [Weights.random(layer, options.device, options.seed + s) for s in range(n_sets)]
    for point in points:
        if time.monotonic() > options.deadline:
            result.stopped = f"out of time before {layer.name} T={point}"
            break
        try:
            with torch.inference_mode():
                _measure_point(layer, sets, point, implementations, ceilings, options, described["draws"], result.rows)
        except DeviceLost as lost:
            result.stopped = f"{layer.name} T={point}: the device was lost: {lost}"
            break
        finally:
            save()
        _free(options.device)
    else:
        del sets
        _free(options.device)


def _measure_point(
    layer: Layer,
    sets: Sequence[Weights],
    point: Point,
    implementations: Sequence[Implementation],
    ceilings: Ceilings,
    options: Options,
    draws: list[dict[str, Any]],
    rows: list[dict[str, Any]],
) -> None:
    drawn = draws_of(layer, point, len(sets), options)
    sets = [*sets] * (len(drawn) // len(sets))
    inputs = _inputs(layer, sets, drawn, point, options)
    # a turn makes every draw's call, so its floor is the mean of the floors of the draws
    floors = [floor(layer, given.draw, ceilings) for given in inputs]
    mean = {f"{key}_us": sum(getattr(f, f"{key}_us") for f in floors) / len(floors) for key in ("bytes", "flops")}
    floor_us = sum(f.us for f in floors) / len(floors)
    where = {"layer": layer.name, "T": point.T, "skewed": point.skewed}
    draws.append(
        {
            "T": point.T,
            "skewed": point.skewed,
            "seed": _seed(point, options),
            "calls": len(inputs),
            "active_experts": [given.draw.active for given in inputs],
            "most_tokens_of_an_expert": [given.draw.most for given in inputs],
            "rotated_bytes": sum(given.draw.active for given in inputs) * layer.expert_bytes,
            "pairs": [given.draw.pairs for given in inputs],
            "checked_tokens": len(inputs[0].tokens),
            "floor_us": floor_us,
            "byte_floor_us": mean["bytes_us"],
            "flop_floor_us": mean["flops_us"],
        }
    )
    options.say(f"{layer.name} T={point}: floor {floor_us:.1f} us")

    attempts: list[Attempt] = []
    clock = clock_for(options.device)
    pool = torch.cuda.graph_pool_handle() if options.device == "cuda" else None
    for implementation in implementations:
        try:
            attempts += attempt(implementation, layer, sets, inputs, pool)
        except DeviceLost as lost:
            rows.append(where | Attempt(implementation, "eager", "failed", str(lost)).row(floor_us))
            raise
    take_turns(warm_up(attempts, clock), clock, options.rounds, options.seconds)
    for a in attempts:
        row = where | a.row(floor_us) | {"floor_us": floor_us}
        rows.append(row | {"byte_floor_us": mean["bytes_us"], "flop_floor_us": mean["flops_us"]})
        said = f"{row['median_us']:.1f} us, {row['over_floor']:.2f}x" if a.status == "ok" else f"{a.status}: {a.reason}"
        options.say(f"  {a.implementation.name}, {a.mode}: {said}")


def draws_of(layer: Layer, point: Point, n_sets: int, options: Options) -> list[Draw]:
    """The draws of a turn: one of each set, and of FEW tokens on CUDA as many more as CALLS allow, whose experts no
    other draw of the set reads."""
    several = options.device == "cuda" and point.T <= FEW
    passes = min(CALLS // n_sets, layer.E // (point.T * layer.K)) if several else 1
    taken = torch.zeros(n_sets, layer.E, dtype=torch.bool)
    draws = []
    for call in range(max(1, passes) * n_sets):
        draw = Draw.random(point.T, layer.E, layer.K, _seed(point, options) + call, point.skewed)
        draw = draw if call < n_sets else draw.beside(taken[call % n_sets])
        taken[call % n_sets, draw.ids.long()] = True
        draws.append(draw)
    return draws


def _inputs(
    layer: Layer, sets: Sequence[Weights], draws: Sequence[Draw], point: Point, options: Options
) -> list[Inputs]:
    seed = _seed(point, options)
    generator = torch.Generator(options.device).manual_seed(seed)
    inputs = []
    for call, (weights, draw) in enumerate(zip(sets, draws, strict=True)):
        hidden = torch.randn(point.T, layer.H, generator=generator, device=options.device).to(layer.dtype)
        inputs.append(Inputs.of(layer, hidden, draw, weights, seed + call))
    return inputs


def _seed(point: Point, options: Options) -> int:
    """Of a point's first draw; the draw of call n has the seed n further on."""
    return options.seed + 1000 * point.T + 500 * point.skewed


def _free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
