"""Bytes of a bucketed cache, and how many pages a memory holds. Plain numbers."""

from __future__ import annotations

from ...arguments import integer
from ...errors import RequestError
from ...sizes import ceil_div
from ..cache import CacheSizes
from ..pages import MOST_ROWS
from .allocation import Allocation
from .storage import bytes_of_token


def bytes_of(allocation: Allocation, sizes: CacheSizes, rows: int, pages: int) -> int:
    """Bytes of all tiers of a cache of so many rows and pages: payload, scales and positions."""
    own, total = allocation, 0
    for bits in own.tiers:
        high = rows * (own.high_slots // own.page) if bits == own.high else 0
        token = sizes.layers * bytes_of_token(bits, sizes.kv_heads, sizes.head_dim) + 4
        total += (1 + high + own.pool(bits, rows, pages)) * own.page * token
    return total


def pages_in(allocation: Allocation, sizes: CacheSizes, rows: int, memory: int) -> int:
    """Pages that `memory` bytes hold, but no more than the rows can use.

    Raises:
        RequestError: no integers; memory for less than one page, with the high tiers of all rows.
    """
    rows, memory = integer("rows", rows, high=MOST_ROWS), integer("memory", memory, 0)
    least = bytes_of(allocation, sizes, rows, 1)
    if memory < least:
        raise RequestError(
            "the memory holds no page of keys and values",
            got=f"{memory:,} bytes",
            expected=f"at least {least:,}: {allocation.high_slots} tokens of {allocation.high} bits for each of "
            f"{rows} rows, and a page of {allocation.page} tokens",
            remedy="give more memory, or fewer rows",
        )
    low, high = 1, rows * ceil_div(allocation.capacity, allocation.page)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if bytes_of(allocation, sizes, rows, middle) <= memory else (low, middle - 1)
    return low
