"""Decode steps, one new token for every sequence: planned by the host, or of fixed size and replayed as CUDA graphs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ttnn_moe.kv.cache import RowCache
from ttnn_moe.kv.step import DecodeStep
from ttnn_moe.sizes import power_of_2

from .graphs import Captured, capture
from .model import LanguageModel, Qwen3Moe
from .sampling import Sampling, choose


class Pending(Protocol):
    """Tokens that a step is making."""

    def tokens(self) -> list[int]:
        """Wait for them; one of each row that was in the step. The one synchronisation of a step."""

    def seconds(self) -> float:
        """What the step took on the device, after tokens(); 0 where the host does nothing meanwhile but wait for it."""


class Steps(Protocol):
    """Decode steps over the rows of a cache, some of which are in use.

    Attributes:
        ahead: whether the next step may be launched before the tokens of the last are known.
    """

    ahead: bool

    def begin(self, first: Tensor) -> Pending:
        """Rows 0 .. B-1 are in use, as long as the cache says; first [B] are their first new tokens."""

    def launch(self, sampling: Sampling, uniform: Tensor | None) -> Pending:
        """Feed every row in use its last token. uniform: [rows] fp64 on the host; None = greedy."""

    def keep(self, rows: Sequence[int]) -> None:
        """Of the rows in use (by their place in the last step), use only these from now on; ascending."""


@dataclass(frozen=True)
class Drawn:
    """Rows of a step that are drawn in one way.

    Attributes:
        sampling: with a temperature. uniform: [n] fp64 on the host. rows: their places in the step; None: all.
    """

    sampling: Sampling
    uniform: Tensor
    rows: Sequence[int] | None = None


@dataclass(frozen=True)
class Made:
    """Tokens of a step that is over."""

    made: Tensor

    def tokens(self) -> list[int]:
        return self.made.tolist()

    def seconds(self) -> float:
        return 0.0


class HostSteps:
    """Every step planned by the host, from tokens it has seen. Runs everywhere."""

    ahead = False

    def __init__(self, model: LanguageModel, cache: Any):
        self.model, self.cache = model, cache
        self._last = torch.empty(0, dtype=torch.int64)

    def begin(self, first: Tensor) -> Pending:
        self._last = first
        return Made(first)

    def launch(self, sampling: Sampling, uniform: Tensor | None) -> Pending:
        logits = self.model(self._last, self.cache, self.cache.decode())
        self._last = choose(logits, sampling, None if uniform is None else uniform.to(logits.device))
        return Made(self._last)

    def keep(self, rows: Sequence[int]) -> None:
        self.cache.keep(rows)
        self._last = self._last[torch.tensor(rows, device=self._last.device)]


class FixedSteps:
    """Steps of fixed size on buffers that stay: last tokens, positions and rows live on the device.

    A step takes the smallest bucket that holds its rows; what is past them is routed to no expert and writes nothing.
    On CUDA a bucket is captured as a graph when it is first needed; elsewhere (under Triton's interpreter, to test
    this) its operators run again.

    Args:
        model: whose operators Triton kernels serve, on the cuda backend.
        cache: of the rows; what its lengths say counts at begin() only.
        graphs: capture them, on CUDA; False: operators run again there too.
    """

    ahead = True

    def __init__(self, model: Qwen3Moe, cache: RowCache, graphs: bool = True):
        self.model, self.cache, self.device = model, cache, model.device
        self.size = bucket(cache.rows)

        def numbers(dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(self.size, dtype=dtype, device=self.device)

        self._ids, self._positions, self._rows, self._advance = numbers(), numbers(), numbers(), numbers()
        self._count = torch.zeros((), dtype=torch.int32, device=self.device)
        self._used = 0
        self._captured: dict[int, Captured] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" and graphs else None
        # two steps are under way at most
        self._landings = deque(Landing(self.size, self.device) for _ in range(3))
        self._use(0)

    def begin(self, first: Tensor) -> Pending:
        B = len(first)
        landing = self._landing().send(first)  # ahead of what only the next step needs
        self._used = 0
        self.join(first, self.cache.lengths[:B], range(B))
        return landing

    def join(self, first: Tensor, positions: Sequence[int], rows: Sequence[int]) -> None:
        """Use more rows behind those in use: the cache's `rows`, whose next tokens are `first` [n], at `positions`."""
        n, own = self._used + len(rows), slice(self._used, self._used + len(rows))
        self._ids[own] = first
        self._positions[own], self._rows[own] = to_device([list(positions), list(rows)], self.device)
        self._use(n)

    @property
    def last(self) -> Tensor:
        """[rows in use] int64, what the next step feeds: on the device, and it changes there."""
        return self._ids[: self._used]

    def advance(self, tokens: Tensor) -> None:
        """Another step than one of these made the next tokens [rows in use]."""
        self.last.copy_(tokens)
        self._positions += self._advance

    def launch(self, sampling: Sampling, uniform: Tensor | None) -> Pending:
        return self.launch_each([Drawn(sampling, uniform)] if uniform is not None and sampling.temperature > 0 else [])

    def launch_each(self, drawn: Sequence[Drawn]) -> Pending:
        """As launch, but rows may differ in how they are drawn; those that `drawn` does not name are greedy."""
        n = self._used
        step = self.capture(bucket(n))
        landing = self._landing()
        step.replay()
        draw(self._ids[:n], step.out[:n], drawn)
        return landing.send(self._ids[:n])

    def keep(self, rows: Sequence[int]) -> None:
        index, n = to_device(rows, self.device), len(rows)
        for state in (self._ids, self._positions, self._rows):
            state[:n] = state[index]
        self._use(n)

    def capture(self, n: int) -> Captured:
        """The step of n rows. A capture leaves tokens and positions as they were: what it writes into the cache lies
        where the next step writes again."""
        if n not in self._captured:
            step = DecodeStep(
                rows=self._rows[:n],
                positions=self._positions[:n],
                bound=self.cache.capacity,
                num_tokens=self._count if n > 1 else None,
            )
            state = self._ids, self._positions
            saved = [values.clone() for values in state]
            self._captured[n] = capture(lambda: self._run(n, step), self.pool)
            with torch.inference_mode():
                for values, before in zip(state, saved, strict=True):
                    values.copy_(before)
        return self._captured[n]

    def _run(self, n: int, step: DecodeStep) -> Tensor:
        logits = self.model(self._ids[:n], self.cache, step)
        self._ids[:n] = choose(logits, Sampling())
        self._positions += self._advance
        return logits

    def _use(self, n: int) -> None:
        self._used = n
        self._count.fill_(n)
        self._advance[:n] = 1
        self._advance[n:] = 0
        # of rows not in use: any that is in range
        self._positions[n:] = 0
        self._rows[n:] = self.cache.spare

    def _landing(self) -> Landing:
        self._landings.rotate()
        return self._landings[0].begin()


class Landing:
    """Host memory that tokens reach while the host does something else."""

    def __init__(self, size: int, device: torch.device):
        cuda = device.type == "cuda"
        self._memory, self._n = torch.empty(size, dtype=torch.int64, pin_memory=cuda), 0
        self._begun, self._over = (torch.cuda.Event(enable_timing=True) if cuda else None for _ in range(2))

    def begin(self) -> Landing:
        """What follows on the device is the step."""
        if self._begun is not None:
            self._begun.record()
        return self

    def send(self, tokens: Tensor) -> Landing:
        """The step ends with these."""
        self._n = len(tokens)
        self._memory[: self._n].copy_(tokens, non_blocking=True)
        if self._over is not None:
            self._over.record()
        return self

    def tokens(self) -> list[int]:
        if self._over is not None:
            self._over.synchronize()
        return self._memory[: self._n].tolist()

    def seconds(self) -> float:
        if self._begun is None or self._over is None:
            return 0.0
        return self._begun.elapsed_time(self._over) / 1e3


def draw(tokens: Tensor, logits: Tensor, drawn: Sequence[Drawn]) -> None:
    """Put what is drawn from logits [R, V] into tokens [R]; the others stay."""
    for part in drawn:
        uniform = part.uniform
        if logits.is_cuda:
            uniform = uniform.pin_memory().to(logits.device, non_blocking=True)
        if part.rows is None:
            tokens.copy_(choose(logits, part.sampling, uniform))
        else:
            rows = to_device(part.rows, logits.device)
            tokens[rows] = choose(logits[rows], part.sampling, uniform)


def to_device(values: Sequence[Any], device: torch.device) -> Tensor:
    """A tensor of int64, without waiting for the device."""
    host = torch.tensor(values, dtype=torch.int64)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def bucket(n: int) -> int:
    """The size of the step that serves n rows: the least power of two that is not below."""
    return power_of_2(n)


def buckets(largest: int) -> list[int]:
    """Every bucket up to one, the largest first."""
    return [1 << i for i in reversed(range(bucket(largest).bit_length()))]
