"""Attention of one query token a sequence: decode_attention, then merge_attention of gpu_kernels/triton."""

from __future__ import annotations

import torch
from torch import Tensor

from ...sizes import power_of_2
from .. import device as devices
from ..triton_launch import Tile, pdl, precision
from .memory import Memory, scale_of, why_not_q, within

NAME = "Triton decode_attention"
MAX_SPLITS = 64
FEW = 4
"""Programs up to which the keys of a short cache are split. Tuned on an H200, with 2 and 4 programs."""


def why_not(q: Tensor, memory: Memory, out: Tensor | None = None) -> str | None:
    """Why the kernel does not attend q to this memory; None: it does."""
    return why_not_q(q, memory, out)


def launch(q: Tensor, memory: Memory, out: Tensor | None = None) -> Tensor:
    """Attention of q [T, heads, head_dim] to the keys 0 .. position of each row. The kernel reads the positions."""
    from ttnn_moe.gpu_kernels.triton import decode_attention as kernel
    from ttnn_moe.gpu_kernels.triton.merge_attention import merge_attention

    T, heads, D = q.shape
    kv_heads, capacity = memory.keys.shape[1], memory.capacity
    splits = splits_of(T, kv_heads, capacity, devices.gpu(q.device).multiprocessors)
    out = torch.empty_like(q) if out is None else out
    partial = lse = None
    if splits > 1:
        partial = q.new_empty(T, heads, splits, D, dtype=torch.float32)
        lse = q.new_empty(T, heads, splits, dtype=torch.float32)
    group, of, overlap = heads // kv_heads, within(tile(D, q.element_size()), memory.page), pdl(q.device)
    kernel.decode_attention[(T, kv_heads, splits)](
        *(q, memory.keys, memory.values, memory.pages, memory.rows, memory.positions, memory.num_tokens),
        *(out, partial, lse, scale_of(D), capacity),
        KV=kv_heads,
        G=group,
        D=D,
        SPLITS=splits,
        BOUND=memory.num_tokens is not None,
        PRECISION=precision(q),
        G_PAD=max(16, power_of_2(group)),
        PAGE=memory.page,
        STRIDE=memory.stride,
        **of.constants,
        num_warps=of.warps,
        **overlap,
    )
    if splits > 1:
        merge_attention[(T * heads,)](partial, lse, out, D=D, SPLITS=splits, num_warps=4, **overlap)
    return out


def tile(D: int, itemsize: int) -> Tile:
    """Within 99 KiB of shared memory, the least of all supported GPUs."""
    return Tile({"BLOCK_N": 64 if D * itemsize <= 256 else 32, "STAGES": 3 if D * itemsize <= 512 else 2}, 4)


def splits_of(T: int, kv_heads: int, capacity: int, multiprocessors: int) -> int:
    """Parts of the keys, a power of two: programs for two waves, each of at least 128 keys, or 64 of a short cache."""
    short = capacity <= 512
    if short and T * kv_heads > FEW:
        return 1  # merging would cost more than it saves
    splits, least = 1, 64 if short else 128
    while splits < MAX_SPLITS and 2 * splits * T * kv_heads <= 2 * multiprocessors and 2 * splits * least <= capacity:
        splits *= 2
    return splits
