"""The cache of sessions: rows 0 .. B-1, all of one room, each with its pages from the start."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ttnn_moe.kv.cache import CacheSizes
from ttnn_moe.kv.paged import PAGE, PagedCache
from ttnn_moe.kv.step import DecodeStep
from ttnn_moe.sizes import ceil_div

from .config import Qwen3MoeConfig


def sizes_of(config: Qwen3MoeConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> CacheSizes:
    """What a cache has to know of a model."""
    heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    return CacheSizes(config.num_hidden_layers, *heads, dtype, torch.device(device))


class StaticCache(PagedCache):
    """Keys and values of B sequences of up to `capacity` tokens, allocated once."""

    def __init__(
        self, config: Qwen3MoeConfig, B: int, capacity: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ):
        super().__init__(sizes_of(config, dtype, device), B, capacity, B * ceil_div(capacity, PAGE))
        for row in range(B):
            self.open(row, capacity)
        self.capacity, self.lengths = capacity, [0] * B

    @staticmethod
    def nbytes(config: Qwen3MoeConfig, B: int, capacity: int, dtype: torch.dtype) -> int:
        """Bytes that a cache of this size holds."""
        return B * ceil_div(capacity, PAGE) * PagedCache.page_bytes(sizes_of(config, dtype))

    def room(self, row: int) -> int:
        return self.capacity

    def decode(self, rows: Sequence[int] | None = None, positions: Sequence[int] | None = None) -> DecodeStep:
        """As RowCache; without arguments every row in use, in order, which grows by one.

        Raises:
            RequestError: a row is full.
        """
        if rows is not None and positions is not None:
            return super().decode(rows, positions)
        step = super().decode(range(len(self.lengths)), self.lengths)
        self.lengths = [n + 1 for n in self.lengths]
        return step

    def clear(self, B: int) -> None:
        """Forget everything; rows 0 .. B-1 are in use from now on."""
        self.lengths = [0] * B

    def keep(self, rows: Sequence[int]) -> None:
        """Drop every row but these (ascending), which become rows 0 .. len(rows) - 1. Pages stay in place."""
        order = [*rows, *(row for row in range(self.rows + 1) if row not in rows)]
        assert order[-1] == self.spare, "the dummy row stays the last"
        self.table.copy_(self.table[torch.tensor(order, device=self.table.device)])
        self._own = [self._own[row] for row in order]
        self.lengths = [self.lengths[row] for row in rows]
