"""Prefill steps of fixed size, as CUDA graphs: launching a short prompt's kernels takes longer than running them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import ops
from .cache import StaticCache, Step
from .decode import bucket
from .graphs import Captured, capture
from .model import Qwen3Moe

LARGEST = 2048
"""Tokens of the largest step: above it the GPU is busy for longer than the host."""

SMALLEST = 64


class FixedPrefill:
    """Packed prompts in steps of 64 .. 2048 tokens, each captured once; tokens past those of a step count for nothing.

    Args:
        model: whose operators Triton kernels serve, on the cuda backend.
        cache: where keys and values go.
        pool: memory pool of the graphs; None without CUDA, where the operators run again.
    """

    def __init__(self, model: Qwen3Moe, cache: StaticCache, pool: Any):
        self.model, self.cache, self.pool = model, cache, pool
        rows, device = cache.k.shape[1], model.device
        largest = max(SMALLEST, min(LARGEST, bucket(rows * cache.capacity)))
        self.sizes = [n for n in (SMALLEST << i for i in range(16)) if n <= largest]
        self._tile = ops.prefill_rows(cache.k)
        self._ends = rows
        # ids, positions and rows of the tokens; then which of them have logits
        self._words = torch.zeros(3 * largest + rows, dtype=torch.int64, device=device)
        # tiles of the attention; then how many tokens count
        self._tiles = torch.zeros(4 * self._tiles_of(largest) + 1, dtype=torch.int32, device=device)
        self._captured: dict[int, Captured] = {}

    def capture(self, n: int) -> Captured:
        """Capture the step of n tokens, one of `sizes`; it writes nothing meanwhile."""
        if n in self._captured:
            return self._captured[n]
        self._tiles.zero_()
        ids, positions, rows, ends = self._words[: 3 * n + self._ends].split((n, n, n, self._ends))
        tiles, count = self._tiles[: 4 * self._tiles_of(n)].view(-1, 4), self._tiles[4 * self._tiles_of(n)]
        step = Step(rows, positions, logits_at=ends, spans=(), tiles=tiles, num_tokens=count)
        self._captured[n] = capture(lambda: self.model(ids, self.cache, step), self.pool)
        return self._captured[n]

    def run(self, ids: Sequence[int], chunks: Sequence[tuple[int, int]], ends: Sequence[int]) -> Tensor | None:
        """Logits [len(ends), vocab_size] of a step, as StaticCache.prefill plans it; None: no captured step holds it.

        They stay until the next step.
        """
        n = next((n for n in self.sizes if n >= len(ids)), None)
        if n is None or n not in self._captured:
            return None
        spans = self.cache.spans(chunks)
        words, T = torch.zeros(3 * n + self._ends, dtype=torch.int64), len(ids)
        words[:T] = torch.tensor(ids)
        for span in spans:
            words[n + span.first :][: span.n] = torch.arange(span.past, span.past + span.n)
            words[2 * n + span.first :][: span.n] = span.row
        words[3 * n :][: len(ends)] = torch.tensor(ends, dtype=torch.int64)
        tiles = torch.zeros(4 * self._tiles_of(n) + 1, dtype=torch.int32)
        plan = ops.prefill_tiles(spans, self.cache.k).flatten()
        tiles[: len(plan)] = plan
        tiles[-1] = T
        for host, device in ((words, self._words), (tiles, self._tiles)):
            host = host.pin_memory() if device.is_cuda else host
            device[: len(host)].copy_(host, non_blocking=True)
        step = self._captured[n]
        step.replay()
        return step.out[: len(ends)]

    def _tiles_of(self, n: int) -> int:
        """Tiles of the attention that any n tokens in this many rows need at most."""
        return n // self._tile + self._ends
