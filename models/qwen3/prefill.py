"""Prefill steps of fixed size, as CUDA graphs: launching a short prompt's kernels takes longer than running them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import ops
from .cache import RowCache, Step
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
        self, model: Qwen3Moe, cache: RowCache, pool: Any, sequences: int | None = None, decoding: int = 0,
        tokens: int | None = None,
    ):  # fmt: skip
        self.model, self.cache, self.pool, self.decoding = model, cache, pool, decoding
        self._sequences, device = sequences or cache.rows, model.device
        held = cache.rows * cache.capacity
        largest = max(SMALLEST, min(LARGEST, bucket(min(tokens or held, held))))
        self.sizes = sizes_to(largest)
        self._tile = ops.prefill_rows(cache.k)
        self._ends = decoding + self._sequences
        # ids, positions and rows of the tokens; then which of them have logits
        self._words = torch.zeros(3 * largest + self._ends, dtype=torch.int64, device=device)
        # tiles of the attention; then how many tokens count, how many of them decode, and how many have logits
        self._tiles = torch.zeros(4 * self._tiles_of(largest) + 3, dtype=torch.int32, device=device)
        self._captured: dict[int, Captured] = {}

    def capture(self, n: int) -> Captured:
        """Capture the step of n tokens, one of `sizes`; it writes nothing meanwhile."""
        if n in self._captured:
            return self._captured[n]
        self._tiles.zero_()
        ids, positions, rows, ends = self._words[: 3 * n + self._ends].split((n, n, n, self._ends))
        tiles, counts = self._tiles[: 4 * self._tiles_of(n)].view(-1, 4), self._tiles[4 * self._tiles_of(n) :]
        step = Step(
            rows, positions, logits_at=ends, spans=(), tiles=tiles, num_tokens=counts[0], bound=self.cache.capacity,
            decoding=min(self.decoding, n), num_decoding=counts[1], num_wanted=counts[2],
        )  # fmt: skip
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
        pinned = self._words.is_cuda
        words = torch.zeros(3 * n + self._ends, dtype=torch.int64, pin_memory=pinned)
        tokens, positions, rows, ends_at = words.split((n, n, n, self._ends))
        tokens[before:T] = host_ids(ids)
        if decoding:
            rows[:before], positions[:before] = torch.tensor(decoding, dtype=torch.int64).T
        for span in spans:
            own = slice(span.first, span.first + span.n)
            torch.arange(span.past, span.past + span.n, out=positions[own])
            rows[own] = span.row
        wanted = [*range(before), *(before + at for at in ends)]
        ends_at[: len(wanted)] = torch.tensor(wanted, dtype=torch.int64)
        tiles = torch.zeros(4 * self._tiles_of(n) + 3, dtype=torch.int32, pin_memory=pinned)
        plan = ops.prefill_tiles(spans, self.cache.k).flatten()
        tiles[: len(plan)] = plan
        tiles[-3:] = torch.tensor((T, before, len(wanted)))
        for host, device in ((words, self._words), (tiles, self._tiles)):
            device[: len(host)].copy_(host, non_blocking=True)
        if last is not None:
            self._words[:before] = last
        step = self._captured[n]
        step.replay()
        return step.out[: len(wanted)]

    def _tiles_of(self, n: int) -> int:
        """Tiles of the attention that any n tokens in this many rows need at most."""
        return n // self._tile + self._sequences


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
