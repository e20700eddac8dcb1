"""Prefill steps of fixed size, as CUDA graphs: launching a short prompt's kernels takes longer than running them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ttnn_moe.kv.cache import RowCache
from ttnn_moe.kv.step import DecodeStep, PrefillStep
from ttnn_moe.sizes import ceil_div

from .decode import FixedSteps, bucket, buckets
from .graphs import Captured, capture
from .model import LanguageModel, Qwen3Moe

Progress = Callable[[int, int], None]
"""Called with graphs captured so far and graphs in all."""

SMALLEST, LARGEST = 64, 4096
"""Tokens of steps."""

MANY, SPARE = 2048, 256
"""Above so many tokens the GPU waits for the host in the first layer only: as long as so many more tokens take."""


def prefill(
    model: LanguageModel,
    cache: Any,
    fixed: FixedPrefill | None,
    ids: Sequence[int] | Tensor,
    chunks: Sequence[tuple[int, int]],
    ends: Sequence[int],
    decoding: Sequence[tuple[int, int]] = (),
    last: Tensor | None = None,
) -> Tensor:
    """Run packed prompts, or pieces of them, by a captured step where one holds them.

    Args:
        ids: [T] tokens, on the host. chunks, ends: rows and tokens, and whose logits are wanted: see RowCache.prefill.
        decoding: rows and positions of tokens that run with them, each the next of its row; last: these, on the device.

    Returns:
        [len(decoding) + len(ends), vocab_size]; valid until the next step.
    """
    logits = None if fixed is None else fixed.run(ids, chunks, ends, decoding, last)
    if logits is None:
        step = cache.prefill(chunks, ends, decoding)
        tokens = host_ids(ids).to(model.device)
        logits = model(tokens if last is None else torch.cat((last, tokens)), cache, step)
    return logits


def host_ids(ids: Sequence[int] | Tensor) -> Tensor:
    """int64, on the host. torch.tensor takes twenty times as long, and a GPU waits for it.

    Raises:
        OverflowError: one is negative, or has more than 64 bits.
    """
    if isinstance(ids, Tensor) or not len(ids):
        return torch.as_tensor(ids, dtype=torch.int64, device="cpu")
    # unsigned: array takes them twice as fast; of bytes it would not take the items
    return torch.frombuffer(array("Q", ids if isinstance(ids, list) else list(ids)), dtype=torch.int64)


def sizes_to(largest: int) -> list[int]:
    """Tokens of steps up to a power of two: powers of two, and from 512 on also what lies half way between."""
    powers = [SMALLEST << i for i in range(16) if SMALLEST << i <= largest]
    return sorted((*powers, *(n // 4 * 3 for n in powers if n > 512)))


def size_for(T: int, sizes: Sequence[int]) -> int | None:
    """The step for T tokens; None: they do better without."""
    n = next((n for n in sizes if n >= T), None)
    return None if n is None or (T > MANY and n - T > SPARE) else n


class FixedPrefill:
    """Packed prompts in steps of 64 .. 4096 tokens, each captured once; tokens past those of a step count for nothing.

    Args:
        model: whose operators Triton kernels serve, on the cuda backend.
        cache: where keys and values go.
        pool: memory pool of the graphs; None without CUDA, where the operators run again.
        sequences: of a step, at most; default: the cache's rows.
        decoding: tokens of rows that decode meanwhile, before them; at most.
        tokens: of a step, at most, and no more than the cache holds; default: that.
    """

    def __init__(
        self,
        model: Qwen3Moe,
        cache: RowCache,
        pool: Any,
        sequences: int | None = None,
        decoding: int = 0,
        tokens: int | None = None,
    ):
        self.model, self.cache, self.pool, self.decoding = model, cache, pool, decoding
        self._sequences, device = sequences or cache.rows, model.device
        held = cache.rows * cache.capacity
        largest = max(SMALLEST, min(LARGEST, bucket(min(tokens or held, held))))
        self.sizes = sizes_to(largest)
        self._ends = decoding + self._sequences
        # all that a step is told, in one buffer, so that it takes one copy: see _parts
        self._words = torch.zeros(sum(self._lengths(largest)), dtype=torch.int64, device=device)
        self._captured: dict[int, Captured] = {}

    def capture(self, n: int) -> Captured:
        """Capture the step of n tokens, one of `sizes`; it writes nothing meanwhile."""
        if n in self._captured:
            return self._captured[n]
        self._words.zero_()
        counts, ids, positions, rows, ends = self._parts(self._words, n)
        own = min(self.decoding, n)
        step = PrefillStep(
            rows,
            positions,
            logits_at=ends,
            spans=(),
            plan=counts[4:],
            decoding=DecodeStep(rows[:own], positions[:own], self.cache.capacity, counts[1]) if own else None,
            num_tokens=counts[0],
            num_wanted=counts[2],
        )
        self._captured[n] = capture(lambda: self.model(ids, self.cache, step), self.pool)
        return self._captured[n]

    def run(
        self,
        ids: Sequence[int] | Tensor,
        chunks: Sequence[tuple[int, int]],
        ends: Sequence[int],
        decoding: Sequence[tuple[int, int]] = (),
        last: Tensor | None = None,
    ) -> Tensor | None:
        """Logits of a step, as `prefill` says; None: no captured step holds it. They stay until the next step."""
        before = len(decoding)
        T = before + len(ids)
        n = size_for(T, self.sizes)
        if n is None or n not in self._captured or len(chunks) > self._sequences or before > self.decoding:
            return None
        spans = self.cache.spans(chunks, before)
        words = torch.zeros(sum(self._lengths(n)), dtype=torch.int64, pin_memory=self._words.is_cuda)
        counts, tokens, positions, rows, ends_at = self._parts(words, n)
        tokens[before:T] = host_ids(ids)
        if decoding:
            rows[:before], positions[:before] = torch.tensor(decoding, dtype=torch.int64).T
        for span in spans:
            own = slice(span.first, span.first + span.n)
            torch.arange(span.past, span.past + span.n, out=positions[own])
            rows[own] = span.row
        wanted = [*range(before), *(before + at for at in ends)]
        ends_at[: len(wanted)] = host_ids(wanted)
        numbers = array("i", [T, before, len(wanted), 0, *self.cache.plan(spans)])
        counts[: len(numbers)] = torch.frombuffer(numbers, dtype=torch.int32)
        self._words[: len(words)].copy_(words, non_blocking=True)
        if last is not None:
            self._parts(self._words, n)[1][:before] = last
        step = self._captured[n]
        step.replay()
        return step.out[: len(wanted)]

    def _lengths(self, n: int) -> tuple[int, int, int, int, int]:
        """Words of the parts of a step of n tokens, whose tiles are as many as any packing of them needs at most."""
        plan = self.cache.plan_words(n, self._sequences)
        return 2 + ceil_div(plan, 2), n, n, n, self._ends

    def _parts(self, words: Tensor, n: int) -> tuple[Tensor, ...]:
        """How many tokens of a step count, how many of them decode, how many have logits, 0, and the plan of the
        attention (int32, aligned to 16 bytes); ids, positions and rows of the tokens; which of them have logits."""
        lengths = self._lengths(n)
        counts, *others = words[: sum(lengths)].split(lengths)
        return counts.view(torch.int32), *others


def capture_all(fixed: FixedPrefill, steps: FixedSteps, rows: int, progress: Progress | None) -> None:
    """Capture every size of prefill, and the decode step of every batch bucket up to `rows`."""
    # the largest first: the others share its memory
    work: list[tuple[Callable[[int], Captured], int]] = [(fixed.capture, n) for n in reversed(fixed.sizes)]
    work += [(steps.capture, n) for n in buckets(rows)]
    for done, (capture_one, n) in enumerate(work):
        if progress is not None:
            progress(done, len(work))
        capture_one(n)
    if progress is not None:
        progress(len(work), len(work))
