"""Decode steps of fixed size on buffers that stay, replayed as graphs of the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ttnn_moe.kv.cache import RowCache
from ttnn_moe.kv.step import DecodeStep
from ttnn_moe.kv.transfer import to_device
from ttnn_moe.sizes import power_of_2

from .graphs import Captured, Graphs
from .language_model import LanguageModel
from .sampling import NAN, greedy

BETWEEN = 48, 96
"""Rows of steps between powers of two. At others nothing was gained: docs/notes/qwen3.md."""


class DecodeGraphs:
    """Decode steps of the rows in use: last tokens, positions and cache rows live on the device.

    A step takes `bucket_for` its rows (or what Graphs.begin says); the others are padding. A bucket is captured as a
    graph when it is first needed. On a CPU (under Triton's interpreter, for tests) its operators run again.

    Args:
        cache: of the rows. graphs: of the model's device.
    """

    def __init__(self, model: LanguageModel, cache: RowCache, graphs: Graphs):
        self.model, self.cache, self.graphs, self.device = model, cache, graphs, model.device
        self.size = power_of_2(cache.rows)

        def numbers() -> Tensor:
            return torch.zeros(self.size, dtype=torch.int64, device=self.device)

        self._ids, self._positions, self._rows, self._advance = numbers(), numbers(), numbers(), numbers()
        self._made, self._no_token = numbers(), torch.tensor(NAN, device=self.device)
        self._count = torch.zeros((), dtype=torch.int32, device=self.device)
        self._used = 0
        self._captured: dict[int, Captured] = {}
        self._use(0)

    @property
    def captured(self) -> int:
        """Steps that were captured."""
        return len(self._captured)

    @property
    def last(self) -> Tensor:
        """[rows in use] int64, what the next step feeds: on the device, and it changes there."""
        return self._ids[: self._used]

    @property
    def made(self) -> Tensor:
        """[rows in use] int64, the greedy tokens of the last step as the host reads them, NAN where a logit is NaN: on
        the device, and it changes there."""
        return self._made[: self._used]

    def join(self, first: Tensor, positions: Sequence[int], rows: Sequence[int]) -> None:
        """Use more rows behind those in use: the cache's `rows`, whose next tokens are `first` [n], at `positions`."""
        n, own = self._used + len(rows), slice(self._used, self._used + len(rows))
        self._ids[own] = first
        self._positions[own], self._rows[own] = to_device([list(positions), list(rows)], self.device)
        self._use(n)

    def advance(self, tokens: Tensor) -> None:
        """Another step than one of these made the next tokens [rows in use]."""
        self.last.copy_(tokens)
        self._positions += self._advance

    def keep(self, places: Sequence[int]) -> None:
        """Of the rows in use, by their place, use only these from now on; ascending."""
        n = len(places)
        if not n:
            self._used = 0  # `join` sets up all the rest: nothing delays a prompt
            return
        index = to_device(places, self.device)
        for state in (self._ids, self._positions, self._rows):
            state[:n] = state[index]
        self._use(n)

    def step(self) -> Tensor:
        """Feed every row in use its last token. Its logits [rows in use, V], until the next step; `last` is greedy."""
        return self._padded(bucket_for(self._used))[: self._used]

    def rehearse(self, n: int) -> None:
        """A step of n rows, all of them padding: what is captured when first needed is captured now.

        Does nothing while rows are in use.
        """
        if not self._used:
            with torch.inference_mode():
                self._use(0)  # `keep` may have left rows of others
                self._padded(n)

    def _padded(self, n: int) -> Tensor:
        """Logits of a step of n rows or more, those in use first."""
        bucket = self.graphs.begin(n, self.size)
        if bucket is None:
            with torch.inference_mode():
                return self._run(n, self._step(n))
        step = self.capture(bucket)
        step.replay()
        return step.out

    def capture(self, n: int) -> Captured:
        """The step of n rows. A capture runs the step with padding only: no row of the cache changes."""
        if n not in self._captured:
            used, state = self._used, (self._ids, self._positions, self._rows)
            saved = [values.clone() for values in state]
            with torch.inference_mode():
                self._use(0)
            step, inputs = self._step(n), partial(self.cache.replay_inputs, n)
            try:
                self._captured[n] = self.graphs.capture(lambda: self._run(n, step), inputs)
            finally:  # rows that decode go on, also where memory did not suffice for the graph
                with torch.inference_mode():
                    for values, before in zip(state, saved, strict=True):
                        values.copy_(before)
                    self._use(used)
        return self._captured[n]

    def _step(self, n: int) -> DecodeStep:
        return DecodeStep(
            rows=self._rows[:n],
            positions=self._positions[:n],
            bound=self.cache.capacity,
            num_tokens=self._count if n > 1 and self.graphs.counted else None,
        )

    def _run(self, n: int, step: DecodeStep) -> Tensor:
        logits = self.model(self._ids[:n], self.cache, self.cache.divided(step))
        tokens, nan = greedy(logits, self._ids[:n])
        torch.where(nan, self._no_token, tokens, out=self._made[:n])
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


def bucket_for(rows: int) -> int:
    """Rows of the step that runs so many: the least power of two, or of BETWEEN."""
    return min([power_of_2(rows), *(n for n in BETWEEN if n >= rows)])


def buckets(largest: int) -> list[int]:
    """Every bucket up to that of so many rows, the largest first."""
    return sorted({bucket_for(n) for n in range(1, largest + 1)}, reverse=True)
