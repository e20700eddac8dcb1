"""KV-cache formats by name, as an engine's `kv` and a command line's --kv give them."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..errors import RequestError
from ..visible import shown
from .bucketed import allocation
from .bucketed.allocation import DEFAULT_BITS
from .bucketed.cache import BucketedCache
from .bucketed.memory import bytes_of
from .cache import CacheSizes, RowCache
from .npu_paged import NpuPagedCache
from .paged import PAGE, PagedCache

PAGED, BUCKETED, EIGHT_BITS = "paged", "bucketed", "bfloat8_b"
FORMATS = (PAGED, BUCKETED, EIGHT_BITS)
"""EIGHT_BITS: pages of a Tenstorrent chip, 17 bytes for 16 values."""
KV_BITS = "kv_bits"
"""The option that gives a bucketed cache its bits, as errors name it."""


def check_format(kv: object, kv_bits: object) -> None:
    """Check a format's name, and that bits are given to a format that has some.

    Raises:
        RequestError: no such format; bits for one that has none.
    """
    if kv not in FORMATS:
        raise RequestError(
            "no such KV-cache format", got=f"kv={shown(kv)}", expected=f"one of {list(FORMATS)}", remedy="leave kv out"
        )
    if kv != BUCKETED and kv_bits is not None:
        raise RequestError(
            f"the {kv} KV cache has no choice of bits",
            got=f"kv_bits={shown(kv_bits)}",
            expected=f"kv={BUCKETED!r} with bits",
            remedy=f"give kv={BUCKETED!r} as well, or leave kv_bits out",
        )


def check_budget(kv: str, kv_bits: float | None, capacity: int, page: int | None, longest: int) -> None:
    """Check that rows of `capacity` tokens reach the budget of a bucketed cache; the others have none.

    Args:
        longest: tokens of the model's context: an error names no larger capacity.

    Raises:
        RequestError: see BucketedCache.
    """
    if kv == BUCKETED:
        bits = DEFAULT_BITS if kv_bits is None else kv_bits
        page = BucketedCache.default_page if page is None else page
        allocation.allocate(bits, capacity, page, longest, KV_BITS)


def new_cache(
    kv: str,
    kv_bits: float | None,
    sizes: CacheSizes,
    rows: int,
    capacity: int,
    memory: int | None = None,
    page: int | None = None,
) -> RowCache:
    """An empty cache of this format.

    Args:
        kv: one of FORMATS. kv_bits: of a bucketed one, average bits; default: 4.
        sizes, rows, capacity, memory, page: see PagedCache.within and BucketedCache.within.

    Raises:
        RequestError: see check_format, and the formats; EIGHT_BITS, which this machine has not.
    """
    check_format(kv, kv_bits)
    if kv == PAGED:
        paged = NpuPagedCache if sizes.device.type == "npu" else PagedCache
        return paged.within(sizes, rows, capacity, memory, page)
    if kv == EIGHT_BITS:
        raise RequestError(
            f"a KV cache in {kv} is of backend tenstorrent",
            got=f"kv={kv!r} on {sizes.device.type}",
            expected=f"one of {[PAGED, BUCKETED]}",
            remedy="leave kv out",
        )
    return BucketedCache.within(sizes, rows, capacity, memory, page, DEFAULT_BITS if kv_bits is None else kv_bits)


def least_capacity(kv: str, kv_bits: float | None, tokens: int, longest: int | None = None) -> int:
    """Tokens of a row that holds so many, and that reaches the budget.

    Args:
        longest: tokens of the model's context: an error names a budget that such a row reaches.

    Raises:
        RequestError: see check_format; a budget that no row reaches.
    """
    check_format(kv, kv_bits)
    if kv != BUCKETED:
        return tokens
    bits = DEFAULT_BITS if kv_bits is None else kv_bits
    return max(tokens, allocation.least_capacity(bits, longest=longest, option=KV_BITS))


def bytes_for(
    kv: str, kv_bits: float | None, sizes: CacheSizes, rows: int, tokens: int, longest: int | None = None
) -> int:
    """Bytes of a cache that just holds `rows` sequences of so many tokens. longest: tokens of a row, at most.

    Raises:
        RequestError: see check_format; a budget that no mix of tiers reaches.
    """
    check_format(kv, kv_bits)
    pages = rows * -(-tokens // PAGE)
    if kv == PAGED:
        return pages * PagedCache.page_bytes(sizes)
    if kv == EIGHT_BITS:
        return pages * PagedCache.page_bytes(replace(sizes, dtype=torch.int8)) * 17 // 16
    bits = DEFAULT_BITS if kv_bits is None else kv_bits
    capacity = least_capacity(kv, bits, tokens, longest)
    capacity = capacity if longest is None else min(capacity, longest)
    return bytes_of(allocation.allocate(bits, capacity, longest=longest, option=KV_BITS), sizes, rows, pages)
