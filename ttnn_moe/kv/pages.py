"""The pages of a cache: which are free, and which each row has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..accelerator import free_memory, is_accelerator
from ..arguments import integer
from ..errors import RequestError
from ..sizes import ceil_div
from .cache import CacheSizes, RowCache
from .step import Span

MOST_ROWS = 65_536
"""Rows of a cache: each takes a line of the page table."""

MOST = 2**31 - 1
"""Pages, and tokens of a row: kernels count them in 32 bits."""


class PagePool:
    """The free ones of pages 1 .. n. Page 0 is the dummy page: it takes padding, and nobody reads it."""

    def __init__(self, n: int):
        self.n = n
        # a list of all pages could be larger than memory; those from _fresh on were never taken
        self._returned: list[int] = []
        self._fresh = 1

    @property
    def free(self) -> int:
        """Pages that nobody has."""
        return self.n + 1 - self._fresh + len(self._returned)

    def take(self, n: int) -> list[int]:
        """n pages, which must be free."""
        assert 0 <= n <= self.free
        again = [self._returned.pop() for _ in range(min(n, len(self._returned)))]
        first, self._fresh = self._fresh, self._fresh + n - len(again)
        return [*again, *range(first, self._fresh)]

    def give(self, pages: list[int]) -> None:
        """Take back pages that `take` gave."""
        self._returned.extend(reversed(pages))
        assert self.free <= self.n


class PagedRows(RowCache):
    """A cache whose rows take as many pages as they need and give them back. A format adds tensors and attention.

    Args:
        sizes: of the model. rows: sequences at a time.
        capacity: tokens of each, at most; rounded up to whole pages.
        pages: of all rows together. page: tokens of a page.

    Raises:
        RequestError: sizes that are no positive integers.
    """

    default_page: ClassVar[int]

    def __init__(self, sizes: CacheSizes, rows: int, capacity: int, pages: int, page: int):
        rows = integer("rows", rows, high=MOST_ROWS)
        capacity, pages = integer("capacity", capacity, high=MOST), integer("pages", pages, high=MOST)
        self.sizes, self.rows, self.spare, self.page, self.pool = sizes, rows, rows, page, PagePool(pages)
        self._most = self.needed(capacity)
        self.capacity = self._most * page
        self.lengths = [0] * (rows + 1)
        self._own: list[list[int]] = [[] for _ in range(rows + 1)]

    @classmethod
    def page_bytes(cls, sizes: CacheSizes, page: int | None = None) -> int:
        """Bytes of one page in all layers, keys and values. Default: of the format's own page."""
        return 2 * sizes.layers * sizes.kv_heads * sizes.head_dim * (page or cls.default_page) * sizes.dtype.itemsize

    @classmethod
    def pages_within(cls, sizes: CacheSizes, rows: int, capacity: int, memory: int, page: int | None = None) -> int:
        """Pages that `memory` bytes hold, but no more than the rows can use; page 0 is not counted.

        Raises:
            RequestError: no integers; memory for less than one page.
        """
        rows, capacity = integer("rows", rows, high=MOST_ROWS), integer("capacity", capacity, high=MOST)
        memory = integer("memory", memory, 0)
        page = page or cls.default_page
        one = cls.page_bytes(sizes, page)
        if memory < one:
            raise RequestError(
                "the memory holds no page of keys and values",
                got=f"{memory:,} bytes",
                expected=f"at least {one:,} (of {page} tokens)",
                remedy="give more memory",
            )
        return min(rows * ceil_div(capacity, page), memory // one, MOST)

    @property
    def total(self) -> int:
        return self.pool.n

    @property
    def free(self) -> int:
        """Pages that no row has."""
        return self.pool.free

    def needed(self, tokens: int) -> int:
        return ceil_div(tokens, self.page)

    def open(self, row: int, tokens: int) -> None:
        assert not self._own[row]
        self._own[row] = self.pool.take(self.needed(tokens))
        self.lengths[row] = 0

    def close(self, row: int) -> None:
        self.pool.give(self._own[row])
        self._own[row] = []

    def room(self, row: int) -> int:
        return len(self._own[row]) * self.page

    def _padded(self, row: int) -> list[int]:
        """The pages of a row, in order; 0 past them."""
        return self._own[row] + [0] * (self._most - len(self._own[row]))


class TabledRows(PagedRows):
    """PagedRows whose page table lies on the device."""

    def __init__(self, sizes: CacheSizes, rows: int, capacity: int, pages: int, page: int):
        super().__init__(sizes, rows, capacity, pages, page)
        # rows open together, so one copy of the whole table goes to a device before the next step
        self._host = zeros((self.rows + 1, self._most), torch.int32, torch.device("cpu"))
        self._table, self._stale = self._host.to(sizes.device), False

    def open(self, row: int, tokens: int) -> None:
        super().open(row, tokens)
        own, line = self._own[row], self._host.numpy()[row]  # a torch.tensor would take ten times as long
        line[: len(own)], line[len(own) :] = own, 0
        self._stale = self._table is not self._host

    @property
    def table(self) -> Tensor:
        """[rows + 1, capacity / page] int32 on the device: the pages of each row, in order; 0 past them."""
        if self._stale:
            behind = is_accelerator(self._table.device)
            self._table.copy_(self._host.pin_memory() if behind else self._host, non_blocking=behind)
            self._stale = False
        return self._table

    def spans(self, chunks: Sequence[tuple[int, int]], decoding: Sequence[tuple[int, int]] = ()) -> list[Span]:
        spans = super().spans(chunks, decoding)
        _ = self.table  # a captured step that runs these reads it
        return spans


def default_memory(device: torch.device) -> int:
    """Bytes for keys and values where nobody says: 4 GiB, on an accelerator four fifths of what is free."""
    free = free_memory(device)
    return 4 << 30 if free is None else free // 5 * 4


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU a page of memory is taken when it is first written, so they cost what they hold.

    Raises:
        RequestError: the machine has less memory.
    """
    n = math.prod(shape) * dtype.itemsize
    try:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        # torch.zeros writes them all
        return torch.from_numpy(np.zeros(n, dtype=np.uint8)).view(dtype).view(shape)
    except (MemoryError, ValueError, torch.OutOfMemoryError) as error:
        raise RequestError(
            "the machine has no room for the keys and values",
            got=f"{list(shape)} of {str(dtype).removeprefix('torch.')}, {n:,} bytes",
            expected="a cache that fits its memory",
            remedy="give less memory, fewer rows or a smaller capacity",
        ) from error
