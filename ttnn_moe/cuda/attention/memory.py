"""Keys and values as the attention kernels read them, and what all of these kernels share."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..triton_launch import Tile

TURNS = 256
"""Words of Memory.turns, at least."""


@dataclass(frozen=True)
class Memory:
    """Keys and values of one layer, and where those of a step's T tokens belong.

    Attributes:
        keys, values: [rows, kv_heads, capacity, head_dim]; with pages [pages, kv_heads, page, head_dim]. Contiguous, or
            the same part of every `stride` elements of one contiguous tensor.
        rows, positions: [T] int64; kernels of decode steps also take int32 rows.
        num_tokens: [] int32, or None for all T. Kernels write no token from num_tokens on; torch forms do.
        pages: [rows, capacity / page] int32: key n of a row is key n % page of its page n / page. None: dense.
        past_written: keys and values before each token's position were written by earlier steps, none by this one. A
            decode kernel may then read them before the kernel that writes this step's has ended.
        turns: [TURNS or more] int32 zeros, which kernels count in and leave zero; calls that share it follow one
            another. None: a decode kernel of few tokens does not share long rows among clusters.
        units: of decode_units, for a decode kernel that reads them before its predecessor has ended; with it turns has
            [T * kv_heads] words or more. None: a block takes a row whole, in the order of tokens.
    """

    keys: Tensor
    values: Tensor
    rows: Tensor
    positions: Tensor
    num_tokens: Tensor | None = None
    pages: Tensor | None = None
    past_written: bool = False
    turns: Tensor | None = None
    units: Tensor | None = None

    @property
    def stride(self) -> int:
        """Elements from a token to the next."""
        return self.keys.stride(2)

    @property
    def page(self) -> int:
        """Tokens of a page; 0: dense."""
        return 0 if self.pages is None else self.keys.shape[2]

    @property
    def capacity(self) -> int:
        """Tokens of a row, at most."""
        return self.keys.shape[2] * (1 if self.pages is None else self.pages.shape[1])


def why_not_strides(keys: Tensor, values: Tensor) -> str | None:
    """Why kernels do not find the tokens of a Memory's keys and values; None: they do."""
    _, kv_heads, tokens, _ = keys.shape
    step = keys.stride(2)
    wanted = (kv_heads * tokens * step, tokens * step, step, 1)
    for kept in (keys, values):
        found = kept.stride()  # a dimension of size 1 may have any
        if found != wanted and any(n > 1 and a != b for n, a, b in zip(kept.shape, found, wanted, strict=True)):
            return f"keys or values of strides {found}, not {wanted}"
    return None


def why_not_kept(dtype: torch.dtype, memory: Memory) -> str | None:
    """Why kernels that copy 16 bytes of this dtype at a time do not take keys and values; None: they do."""
    step = memory.stride * dtype.itemsize
    for kept in (memory.keys, memory.values):
        if kept.dtype != dtype or kept.data_ptr() % 16 or step % 16:
            return "keys or values of another dtype, or not aligned to 16 bytes"
    return why_not_strides(memory.keys, memory.values)


def scale_of(D: int) -> float:
    """What kernels multiply scores by. They compute powers of two, not of e."""
    return math.log2(math.e) / math.sqrt(D)


def why_not_heads(heads: int, kv_heads: int, D: int) -> str | None:
    """Why Triton attention kernels do not take these heads; None: they do."""
    if D not in (16, 32, 64, 128, 256):
        return "head_dim is no power of two from 16 to 256"
    return None if heads // kv_heads <= 64 else "more than 64 query heads share a key/value head"


def within(tile: Tile, page: int) -> Tile:
    """The tile for keys in pages: it reads at most one page at a time.

    Triton splits the stages between the page's number and the page.

    Args:
        page: tokens of a page, a power of two, at least 16. 0: dense.
    """
    if page == 0:
        return tile
    constants = tile.constants
    changes = {"BLOCK_N": min(constants["BLOCK_N"], page), "STAGES": 2 * constants["STAGES"] - 1}
    return replace(tile, constants={**constants, **changes})


def why_not_q(q: Tensor, memory: Memory, out: Tensor | None) -> str | None:
    """Why Triton attention kernels do not take q [T, heads, head_dim], or out; None: they do."""
    T, heads, D = q.shape
    if T == 0:
        return "no tokens"
    if not all(t is None or t.is_contiguous() for t in (q, out)):
        return "queries or out are not contiguous"
    return why_not_heads(heads, memory.keys.shape[1], D) or why_not_strides(memory.keys, memory.values)
