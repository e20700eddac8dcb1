"""One implementation at one point: prepared, checked and ready to be timed, or why not."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .gate import Inputs, Verdict, check_calls, check_replay, rounded
from .implementations import Implementation
from .layer import Layer, Weights
from .timing import Call, CpuClock, CudaClock, Spread, Turn, capture, waits_for_device


class DeviceLost(RuntimeError):
    """The device answers nothing more in this process; what was measured until then stands."""


@dataclass
class Attempt:
    """status: "ok" (then turn is there), "wrong" (the gate refused it), "failed" (it raised), "skipped"."""

    implementation: Implementation
    mode: str
    status: str
    reason: str | None = None
    error: float | None = None
    turn: Turn | None = None

    def row(self, floor_us: float) -> dict[str, Any]:
        """What the results hold of it, once its turns were taken."""
        row: dict[str, Any] = {
            "implementation": self.implementation.name,
            "ours": self.implementation.ours,
            "mode": self.mode,
            "status": self.status,
            "reason": self.reason,
            "worst_error": self.error,
        }
        if self.status == "ok" and self.turn is not None and self.turn.samples:
            spread = Spread.of(self.turn.samples)
            row |= {
                "median_us": spread.median,
                "p10_us": spread.p10,
                "p90_us": spread.p90,
                "samples": spread.n,
                "over_floor": spread.median / floor_us,
            }
            if self.turn.host:
                host = Spread.of(self.turn.host)
                row |= {"host_us": host.median, "host_p10_us": host.p10, "host_p90_us": host.p90}
        return row


def attempt(
    implementation: Implementation, layer: Layer, sets: Sequence[Weights], inputs: Sequence[Inputs], pool: Any = None
) -> list[Attempt]:
    """An implementation on every weight set: as a graph (where inputs are on CUDA) and eager.

    Raises:
        DeviceLost: it took the device with it.
    """
    on_cuda = inputs[0].hidden.is_cuda
    modes = ["graph", "eager"] if on_cuda else ["eager"]

    def same(status: str, reason: str | None, error: float | None = None) -> list[Attempt]:
        return [Attempt(implementation, mode, status, reason, error) for mode in modes]

    try:
        reason = implementation.why_not(layer, len(inputs[0].hidden))
        if reason is not None:
            return same("skipped", reason)
        inputs = rounded(inputs, sets, implementation.numerics(layer, len(inputs[0].hidden)))
        calls = _calls(implementation, layer, sets, inputs)
        verdict = check_calls(calls, inputs)
    except Exception as error:
        for weights in sets:
            weights.kept.clear()  # perhaps half made, perhaps what filled the memory
        return same("failed", _told(error, on_cuda))
    if verdict.wrong is not None:
        return same("wrong", verdict.wrong, _finite(verdict))
    eager = Attempt(implementation, "eager", "ok", None, verdict.error, Turn(implementation.name, "eager", calls))
    return [_as_graph(implementation, calls, inputs, pool), eager] if on_cuda else [eager]


def warm_up(attempts: Sequence[Attempt], clock: CpuClock | CudaClock) -> list[Turn]:
    """The turns that can be taken, after one of each; what raised has failed, and spoils no other's time.

    Raises:
        DeviceLost: it took the device with it.
    """
    turns = []
    for one in attempts:
        if one.turn is None:
            continue
        try:
            clock.time([one.turn])
            turns.append(one.turn)
        except Exception as error:
            one.status, one.turn = "failed", None
            one.reason = f"in its first turn: {_told(error, isinstance(clock, CudaClock))}"
    return turns


def _calls(
    implementation: Implementation, layer: Layer, sets: Sequence[Weights], inputs: Sequence[Inputs]
) -> list[Call]:
    calls: list[Call] = []
    for weights, given in zip(sets, inputs, strict=True):
        forward = implementation.prepare(layer, weights, len(given.hidden))
        ids = given.ids.to(implementation.ids_dtype)
        scale = given.weights.to(implementation.weights_dtype or layer.dtype)
        calls.append(partial(forward, given.hidden, ids, scale))
    return calls


def _as_graph(implementation: Implementation, calls: list[Call], inputs: Sequence[Inputs], pool: Any) -> Attempt:
    try:
        waits = waits_for_device(calls)
        if waits is not None:
            return Attempt(implementation, "graph", "skipped", f"not capturable: {waits}")
        torch.cuda.empty_cache()  # eager scratch memory goes back before the graph takes its own
        graph, outputs = capture(calls, pool)
        verdict = check_replay(graph.replay, outputs, inputs)
    except Exception as error:
        return Attempt(implementation, "graph", "failed", _told(error, True))
    if verdict.wrong is not None:
        return Attempt(implementation, "graph", "wrong", verdict.wrong, _finite(verdict))
    turn = Turn(implementation.name, "graph", calls, _Replay(graph, outputs))
    return Attempt(implementation, "graph", "ok", None, verdict.error, turn)


@dataclass
class _Replay:
    """A graph with its outputs, whose memory must not be given to the next graph of the pool."""

    graph: torch.cuda.CUDAGraph
    outputs: list[Tensor]

    def __call__(self) -> None:
        self.graph.replay()


def _finite(verdict: Verdict) -> float | None:
    return verdict.error if verdict.error < float("inf") else None  # JSON has no infinity


def _told(error: Exception, on_cuda: bool) -> str:
    """The first lines of an error; afterwards the device is as it was, or DeviceLost says that it is not."""
    told = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if on_cuda:
        try:
            torch.cuda.synchronize()
        except RuntimeError as lost:
            raise DeviceLost(told) from lost
        gc.collect()
        torch.cuda.empty_cache()
    return told
