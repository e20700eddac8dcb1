"""Attention of long pieces of prompts to packed tiers: gpu_kernels/cuda/sm80/bucketed_unpack.cu makes a row bf16 first.

Then each key is unpacked once, not once for every 128 rows of queries as in bucketed_prompt, and the kernel of prompts
in bf16 attends.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int32
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...accelerator import upload
from ...sizes import ceil_div
from ..arch import target_of, why_not_hopper
from ..jit import load, spec
from . import prefill
from .memory import Memory
from .tiers import UNIT, Tier, addresses, by_bits

NAME = "CUDA C++ bucketed_unpack, then attention in bf16"
HEAD_DIM = 128
ON_HOPPER, ELSEWHERE = 256, 512
"""Queries of a piece: with fewer, bucketed_prompt is as fast or faster. By an H100, and by sm_80 code there."""

WHOLE = 128
"""Positions behind the last token are zeros up to a multiple of it: attention multiplies such values by 0."""


@dataclass(frozen=True)
class Room:
    """Where a row becomes bf16, one layer at a time, and the work of one piece of its prompt.

    Attributes:
        memory: the row as attention reads it: keys and values [1, kv_heads, room, 128] bf16, by position. room is a
            multiple of WHOLE. Attention writes none of them.
        past, n: tokens of the row before the piece, and of the piece.
        tiles: prefill.tiles_of the piece.
    """

    memory: Memory
    past: int
    n: int
    tiles: Tensor

    @classmethod
    def of(cls, memory: Tensor, kv_heads: int, past: int, n: int) -> Room:
        """memory: of numbers_of(kv_heads, past + n) or more bf16 numbers."""
        keys, values = memory.view(2, -1).unbind()
        room = len(keys) // (kv_heads * HEAD_DIM) // WHOLE * WHOLE
        shape = 1, kv_heads, room, HEAD_DIM
        tiles = prefill.tiles_of([(0, n, past, 0)], prefill.queries_of(HEAD_DIM, memory.itemsize))
        words = upload(torch.tensor(tiles, dtype=torch.int32), memory.device)
        used = kv_heads * room * HEAD_DIM
        none = words.new_empty(0, dtype=torch.int64)
        return cls(Memory(keys[:used].view(shape), values[:used].view(shape), none, none), past, n, words)


def least_queries(device: torch.device) -> int:
    """Of a piece that this serves."""
    return ELSEWHERE if why_not_hopper(device) else ON_HOPPER


def numbers_of(kv_heads: int, tokens: int) -> int:
    """bf16 numbers of keys and values of so many tokens."""
    return 2 * kv_heads * ceil_div(tokens, WHOLE) * WHOLE * HEAD_DIM


def unpack(room: Room, k: Tensor, v: Tensor, tiers: Sequence[Tier], row: int, key_scale: Tensor) -> None:
    """Fill a room from one layer.

    Args:
        k, v: [n, kv_heads, 128] bf16, contiguous: keys and values of the piece.
        tiers: of one layer, rotated. row: of their tables.
        key_scale: [128] fp32, what keys were divided by before they were rotated.
    """
    places = addresses(tiers, "payload", "scales", "token_ids", "table", "counts")
    used, wide = by_bits(tiers, lambda tier: tier.table.shape[1]), by_bits(tiers, lambda tier: tier.row_stride)
    device, end = k.device, room.past + room.n
    zeros = ceil_div(end, WHOLE) * WHOLE - end
    keys, values = room.memory.keys, room.memory.values
    kv_heads, size = keys.shape[1:3]
    with torch.cuda.device(device):
        _launch(room.n + zeros, kv_heads, size, tiers[0].page, used, wide, device)(
            load.stream(device.index),
            *(key_scale.data_ptr(), k.data_ptr(), v.data_ptr(), keys.data_ptr(), values.data_ptr()),
            *(row, room.past, room.n, zeros, *places),
        )


@lru_cache(maxsize=1024)
def _launch(
    behind: int, kv_heads: int, size: int, page: int, used: tuple[int, ...], wide: tuple[int, ...], device: torch.device
) -> load.Launch:
    arch = target_of(device).arch
    assert arch is not None
    blocks = sum(used) * page // UNIT + ceil_div(behind, UNIT)
    sizes = map(c_int32, (*used, *wide, size))
    one = spec_of(arch.name, page)
    return load.Launch(one, device.index, (blocks, kv_heads), 256, *sizes, overlap=arch.overlaps)


def spec_of(arch: str, page: int) -> spec.Spec:
    """The kernel for tiers of pages of so many tokens."""
    return spec.Spec.of("sm80/bucketed_unpack", arch, PAGE=page)
