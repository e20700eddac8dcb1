"""Prefill steps of fixed size, as graphs: launching a prompt's kernels may take longer than running them."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from ttnn_moe.accelerator import is_accelerator
from ttnn_moe.kv.cache import RowCache
from ttnn_moe.kv.step import DecodeStep, PrefillStep
from ttnn_moe.sizes import power_of_2

from .graphs import Captured, Graphs
from .language_model import LanguageModel

SMALLEST, LARGEST = 64, 4096
"""Tokens of steps."""

STEP = 256
"""Tokens from a size to the next, from 512 on: padding costs less than launching the kernels one by one."""


def sizes_to(largest: int) -> list[int]:
    """Tokens of steps up to a power of two: powers of two up to 512, then each multiple of STEP."""
    powers = [SMALLEST << i for i in range(16) if SMALLEST << i <= min(largest, 512)]
    return [*powers, *range(512 + STEP, largest + 1, STEP)]


def size_for(T: int, sizes: Sequence[int]) -> int | None:
    """The step for T tokens; None: they are too many."""
    return next((n for n in sizes if n >= T), None)


class PrefillGraphs:
    """Packed prompts in steps of 64 .. 4096 tokens, each captured once, and once more with rows that decode.

    Args:
        cache: where keys and values go.
        graphs: of the model's device.
        tokens: of a step, at most, and no more than the cache holds; default: that.
        decoding: rows that decode meanwhile, at most; default: 0. together: tokens of a step with such rows, at most;
            default: tokens.
    """

    def __init__(
        self,
        model: LanguageModel,
        cache: RowCache,
        graphs: Graphs,
        tokens: int | None = None,
        decoding: int = 0,
        together: int | None = None,
    ):
        self.model, self.cache, self.graphs, self.decoding = model, cache, graphs, decoding
        # the last layer and the head run for a token of each prompt, padding or not
        self._sequences = min(cache.rows, cache.sequences)
        held = cache.rows * cache.capacity
        largest = max(SMALLEST, min(LARGEST, power_of_2(min(tokens or held, held))))
        self.sizes = sizes_to(largest)
        self._together = self.sizes[bisect_left(self.sizes, min(together or largest, largest))]
        cache.reserve(largest)
        self._plan_words: dict[int, int] = {}
        # all that a step is told, in one buffer, so that it takes one copy: see _parts
        length = sum(self._lengths(largest, decoding))
        self._words = torch.zeros(length, dtype=torch.int64, device=model.device)
        self._captured: dict[tuple[int, bool], Captured] = {}
        self._met: set[tuple[int, bool]] = set()

    @property
    def captured(self) -> int:
        """Steps that were captured."""
        return len(self._captured)

    @property
    def kinds(self) -> list[tuple[int, bool]]:
        """What `capture` takes, the largest first: the others share its memory."""
        mixed = self._together if self.decoding else 0
        return [
            (n, with_rows) for n in reversed(self.sizes) for with_rows in (True, False) if n <= mixed or not with_rows
        ]

    def capture(self, n: int, mixed: bool) -> Captured:
        """Capture the step of n tokens, one of `sizes`; it writes nothing meanwhile. mixed: with rows that decode."""
        key = n, mixed
        if key in self._captured:
            return self._captured[key]
        before = min(self.decoding, n) if mixed else 0
        self._words.zero_()
        numbers, ids, positions, rows, ends = (self._words[part] for part in self._parts(n, before))
        counts = numbers.view(torch.int32)
        bound = self.cache.capacity
        step = PrefillStep(
            rows,
            positions,
            bound,
            logits_at=ends,
            spans=(),
            plan=counts[4:],
            decoding=DecodeStep(rows[:before], positions[:before], bound, counts[1]) if mixed else None,
            num_tokens=counts[0],
            num_wanted=counts[2],
        )
        self._captured[key] = self.graphs.capture(lambda: self.model(ids, self.cache, self._divided(step)))
        return self._captured[key]

    def _divided(self, step: PrefillStep) -> PrefillStep:
        own = step.decoding
        return step if own is None else replace(step, decoding=self.cache.divided(own))

    def run(
        self,
        ids: Tensor,
        chunks: Sequence[tuple[int, int]],
        ends: Sequence[int],
        decoding: Sequence[tuple[int, int]] = (),
        last: Tensor | None = None,
    ) -> Tensor | None:
        """Logits of a step, as runner.run_prefill says, until the next step. None: no captured step holds it."""
        before = len(decoding)
        T = before + len(ids)
        n = size_for(T, self.sizes)
        if n is None or len(chunks) > self._sequences or before > min(self.decoding, n):
            return None
        if not self.cache.captures(chunks):
            return None
        most = min(self.decoding, n) if before else 0
        step = self._captured_step(n, before > 0, max(n, most + self._sequences))
        if step is None:
            return None
        spans, plan = self.cache.stage(chunks, decoding)
        parts = self._parts(n, most)
        words = torch.zeros(parts[-1].stop, dtype=torch.int64, pin_memory=is_accelerator(self._words.device))
        host = words.numpy()  # the device waits for this, and tensors take several times as long
        counts, tokens, positions, rows, ends_at = (host[part] for part in parts)
        tokens[before:T] = ids.numpy()
        if decoding:
            rows[:before], positions[:before] = np.array(decoding).T
        for span in spans:
            own = slice(span.first, span.first + span.n)
            positions[own], rows[own] = np.arange(span.past, span.past + span.n), span.row
        wanted = [*range(before), *(before + at for at in ends)]
        ends_at[: len(wanted)] = wanted
        numbers = array("i", [T, before, len(wanted), 0, *plan])
        counts.view(np.int32)[: len(numbers)] = numbers
        self._words[: len(words)].copy_(words, non_blocking=True)
        if last is not None and before:
            self._words[parts[1]][:before] = last
        step.replay()
        return step.out[: len(wanted)]

    def _captured_step(self, n: int, mixed: bool, tokens: int) -> Captured | None:
        """The step of n tokens, whose layers run up to `tokens` rows; None: no graph serves now."""
        key = n, mixed
        if key not in self._captured and (self.graphs.early or key not in self._met):
            self._met.add(key)  # a graph is worth its capture where the size comes again
            return None
        if self.graphs.begin(tokens, power_of_2(tokens)) is None:
            return None
        return self.capture(n, mixed)

    def _lengths(self, n: int, decoding: int) -> tuple[int, int, int, int, int]:
        """int64 words of the parts of a step of n tokens; of the plan, what any packing of them needs at most."""
        if n not in self._plan_words:
            self._plan_words[n] = self.cache.plan_words(n, self._sequences)
        return 2 + (self._plan_words[n] + 1) // 2, n, n, n, decoding + self._sequences

    def _parts(self, n: int, decoding: int) -> list[slice]:
        """Where a step of n tokens has what in its words: valid tokens, of them those that decode, valid entries of
        logits_at, 0, and the cache's plan (all int32; the plan is aligned to 16 bytes); ids; positions; rows;
        logits_at.
        """
        return [slice(*ends) for ends in pairwise((0, *accumulate(self._lengths(n, decoding))))]
