"""A KV cache in pages: rows take as many as they need, and give them back."""

from __future__ import annotations

import torch

from ttnn_moe.errors import RequestError

from .cache import RowCache, Step
from .config import Qwen3MoeConfig
from .decode import to_device
from .ops import Place

PAGE = 64
"""Tokens of a page: what the attention kernels take at a time."""


class PagePool:
    """Which of the pages 1 .. n are free; page 0 is nobody's."""

    def __init__(self, n: int):
        self.n = n
        self._free = list(range(n, 0, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """n pages, which must be free."""
        assert 0 <= n <= self.free
        return [self._free.pop() for _ in range(n)]

    def give(self, pages: list[int]) -> None:
        """Take back pages that `take` gave."""
        self._free.extend(reversed(pages))
        assert self.free <= self.n


class PagedCache(RowCache):
    """Keys and values in pages. What `spare` is told goes to page 0, which nobody reads.

    Args:
        rows: sequences at a time. capacity: tokens of each, at most; rounded up to whole pages.
        pages: of all rows together. page: tokens of one: a power of two, at least 16.

    Attributes:
        k, v: [layers, 1 + pages, kv heads, page, head_dim].
        table: [rows + 1, capacity / page] int32 on the device: the pages of each row, in order; 0 past them.

    Raises:
        RequestError: sizes below 1, or a page of another size.
    """

    def __init__(
        self,
        config: Qwen3MoeConfig,
        rows: int,
        capacity: int,
        pages: int,
        page: int = PAGE,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ):
        if min(rows, capacity, pages) < 1:
            got = f"rows={rows}, capacity={capacity}, pages={pages}"
            raise RequestError("a cache needs room", got=got, expected="1 or more")
        if page < 16 or page & (page - 1):
            raise RequestError("a page has the wrong size", got=page, expected="a power of two, at least 16")
        shape = (config.num_hidden_layers, 1 + pages, config.num_key_value_heads, page, config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.layers = list(zip(self.k, self.v, strict=True))
        self.page, self.pool, self.heads = page, PagePool(pages), config.num_attention_heads
        most = self.needed(capacity)
        self.rows, self.capacity, self.spare = rows, most * page, rows
        self.table = torch.zeros(rows + 1, most, dtype=torch.int32, device=device)
        self.lengths = [0] * (rows + 1)
        self._own: list[list[int]] = [[] for _ in range(rows + 1)]

    @staticmethod
    def page_bytes(config: Qwen3MoeConfig, page: int, dtype: torch.dtype) -> int:
        """Bytes of one page in all layers, keys and values."""
        return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * page * dtype.itemsize

    def needed(self, tokens: int) -> int:
        """Pages that so many tokens of one row take."""
        return -(-tokens // self.page)

    def open(self, row: int, tokens: int) -> None:
        """Give an empty row pages for so many tokens, which must be free and within the capacity."""
        assert not self._own[row]
        own = self._own[row] = self.pool.take(self.needed(tokens))
        self.lengths[row] = 0
        self.table[row] = to_device(own + [0] * (self.table.shape[1] - len(own)), self.k.device)

    def close(self, row: int) -> None:
        """Give a row's pages back. Work under way may still use them: whatever follows on the device comes later."""
        self.pool.give(self._own[row])
        self._own[row] = []

    def room(self, row: int) -> int:
        return len(self._own[row]) * self.page

    def place(self, layer: int, step: Step) -> Place:
        return Place(*self.layers[layer], step.rows, step.positions, step.num_tokens, self.table)
