"""Times: device events and captured graphs on CUDA, the wall clock on the CPU; medians and spread of many turns.

A turn is one call on every weight set, in order; of few tokens several, each with experts of its own (measure.CALLS).
A time is that of the turn over the number of calls. So no call finds its weights in a cache: on an H200 the active
weights of the sets are several times the L2. One graph holds the calls of a turn, as a model's graph holds all its
layers. They share the launch overhead of the graph: some microseconds.
"""

from __future__ import annotations

import random
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Tensor]
# read before every turn, so that each starts with a cache that another has left, and not its own data
SCRATCH_BYTES = 2**28


@dataclass(frozen=True)
class Spread:
    """Microseconds: the median, and the tenth and the ninetieth percentile of n values."""

    median: float
    p10: float
    p90: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        ordered = sorted(values)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)], len(ordered))


@dataclass
class Turn:
    """One implementation in one mode ("graph", "eager"). run() makes one call on every set.

    samples: microseconds a call; host: microseconds until a call returns, where that is another number.
    """

    name: str
    mode: str
    calls: Sequence[Call]
    replay: Callable[[], Any] | None = None
    samples: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)

    def run(self) -> None:
        if self.replay is not None:
            self.replay()
            return
        for call in self.calls:
            start = time.perf_counter()
            call()
            self.host.append((time.perf_counter() - start) * 1e6)


class CpuClock:
    """Wall-clock times of turns."""

    def time(self, turns: Sequence[Turn]) -> None:
        """One sample of every turn."""
        for turn in turns:
            start = time.perf_counter()
            turn.run()
            turn.samples.append((time.perf_counter() - start) * 1e6 / len(turn.calls))
            turn.host.clear()  # the same number

    def synchronize(self) -> None:
        pass


class CudaClock:
    """Device events around turns."""

    def __init__(self) -> None:
        self._scratch = torch.empty(SCRATCH_BYTES // 4, device="cuda").normal_()

    def time(self, turns: Sequence[Turn]) -> None:
        """One sample of every turn, in order."""
        events = []
        for turn in turns:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # the read also keeps the device busy until the graph behind it has been handed over
            self._scratch.sum()
            if turn.replay is None:
                torch.cuda.synchronize()  # an eager call's host time must not hide behind that read
            start.record()
            turn.run()
            end.record()
            events.append((turn, start, end))
        torch.cuda.synchronize()
        for turn, start, end in events:
            turn.samples.append(start.elapsed_time(end) * 1e3 / len(turn.calls))

    def synchronize(self) -> None:
        torch.cuda.synchronize()


def clock_for(device: str) -> CpuClock | CudaClock:
    """The clock of a device type."""
    return CudaClock() if device == "cuda" else CpuClock()


def take_turns(turns: Sequence[Turn], clock: CpuClock | CudaClock, rounds: int, seconds: float) -> int:
    """Time turns that were warmed up, in rounds; returns how many.

    `rounds` of them, or fewer (never under ten) to stay near `seconds`. In every round each turn runs once, in an order
    that is drawn anew. So a slow spell of the machine affects all turns alike, and no turn always follows the same one:
    near a power limit, what ran just before sets the clock.
    """
    if not turns:
        return 0
    start = time.perf_counter()
    clock.time(turns)
    one = time.perf_counter() - start
    for turn in turns:
        turn.samples.clear()
        turn.host.clear()
    n = max(min(rounds, int(seconds / one)), min(rounds, 10))
    order = random.Random(0)
    for _ in range(n):
        clock.time(order.sample(turns, len(turns)))
    return n


def capture(calls: Sequence[Call], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """One graph of all calls, in order, and their outputs, which every replay writes.

    Graphs of one pool share their scratch memory: replay them on one stream, and read outputs only.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        outputs = [call() for call in calls]
    return graph, outputs


def waits_for_device(calls: Sequence[Call]) -> str | None:
    """Why calls cannot be captured: what torch says of the first that waits for the device, or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode does not see every wait; a capture does
            torch.cuda.set_sync_debug_mode("error")
        for call in calls:
            call()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def fastest_us_on_device(call: Callable[[], object]) -> float:
    """Microseconds of one call out of a graph of four, on CUDA: the fastest of twenty.

    Pauses between them keep the power limit from lowering the result.
    """
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            call()
    graph.replay()
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        time.sleep(0.01)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / 4)
    return min(times)
