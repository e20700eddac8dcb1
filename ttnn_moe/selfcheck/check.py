"""One check of a backend, and what running it gave."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

import torch
from torch import Tensor

from .bounds import worst_error

REPEATS = 5
CALLS = 16
"""How often one input is run to see whether its bits stay."""


@dataclass(frozen=True)
class Check:
    """One thing to run on a machine.

    Attributes:
        run: returns what the machine made, [rows, columns]. want: returns what is right, in the same shape.
        bound: the relative error allowed in any row; 0 asks for equal values.
        refused: why the backend says that it cannot run this; then nothing is run.
        once: run it once, untimed: it compares runs itself.
    """

    name: str
    run: Callable[[], Tensor]
    want: Callable[[], Tensor]
    bound: float
    refused: str = ""
    once: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a check gave: error is that of the worst row, microseconds the median of REPEATS runs."""

    name: str
    passed: bool
    error: float | None
    microseconds: float | None
    problem: str = ""

    def __str__(self) -> str:
        verdict = "ok  " if self.passed else "FAIL"
        if self.error is None:
            return f"{verdict} {self.name}: {self.problem}"
        took = "" if self.microseconds is None else f", {self.microseconds:,.0f} us"
        return f"{verdict} {self.name}: error {self.error:.1e}{took}{'; ' + self.problem if self.problem else ''}"


def measure(check: Check, device: str) -> Outcome:
    """Run a check: its error, and then its time. What it raises is a failure with that message."""
    try:
        got = check.run().cpu()
        error = worst_error(got, check.want())
        if check.once:
            return Outcome(check.name, error <= check.bound, error, None)
        again = check.run().cpu()
        times = [_seconds(check.run, device) for _ in range(REPEATS)]
    except Exception as failure:  # of any kind: the next check is to run
        return Outcome(check.name, False, None, None, f"{type(failure).__name__}: {failure}")
    same = torch.equal(got.contiguous().view(torch.uint8), again.contiguous().view(torch.uint8))
    problem = "" if same else "two runs differ"
    return Outcome(check.name, error <= check.bound and same, error, statistics.median(times) * 1e6, problem)


def repeated(name: str, run: Callable[[], Tensor], refused: str = "") -> Check:
    """A check that CALLS equal calls give one result, by their hashes; the error is the number of others."""

    def different() -> Tensor:
        hashes = {sha256(run().cpu().contiguous().view(torch.uint8).numpy().tobytes()).digest() for _ in range(CALLS)}
        return torch.tensor([[float(len(hashes))]])

    name = f"{name}, different results of {CALLS} equal calls"
    return Check(name, different, lambda: torch.ones(1, 1), 0.0, refused, once=True)


def _seconds(run: Callable[[], Tensor], device: str) -> float:
    start = time.perf_counter()
    run()
    if device != "cpu":
        getattr(torch, device).synchronize()
    return time.perf_counter() - start
