"""Attention to packed tiers of any head_dim: gpu_kernels/triton/bucketed_attention.py, then merge_attention.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...sizes import power_of_2
from .. import device as devices
from ..triton_launch import pdl, precision
from .decode import splits_of
from .memory import scale_of
from .tiers import BITS, Tier, by_bits

NAME = "Triton bucketed_attention"
MOST = 256
"""Of head_dim, and of the queries of a key/value head."""


def why_not(q: Tensor, tiers: Sequence[Tier]) -> str | None:
    """For q [T, n, heads, head_dim]."""
    T, n, heads, D = q.shape
    if T == 0 or n == 0:
        return "no queries"
    if D % 32:
        return "head_dim is no multiple of 32"
    if D > MOST or n * heads // tiers[0].kv_heads > MOST:
        return f"head_dim, or the queries of a key/value head, are more than {MOST}"
    return "tiers have pages of different sizes" if len({tier.page for tier in tiers}) > 1 else None


def launch(
    q: Tensor,
    tiers: Sequence[Tier],
    rows: Tensor,
    positions: Tensor | None = None,
    num_tokens: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As bucketed.launch, without a rotation; a query sees tokens up to its own position in all tiers."""
    from ttnn_moe.gpu_kernels.triton.bucketed_attention import bucketed_attention
    from ttnn_moe.gpu_kernels.triton.merge_attention import merge_attention

    T, n, heads, D = q.shape
    kv_heads, page = tiers[0].kv_heads, tiers[0].page
    D_pad, group = power_of_2(D), heads // kv_heads
    capacity = sum(tier.capacity for tier in tiers)
    splits = splits_of(T, kv_heads, capacity, devices.gpu(q.device).multiprocessors)
    partial = q.new_empty(T, n, heads, splits, D_pad, dtype=torch.float32)
    lse = q.new_empty(T, n, heads, splits, dtype=torch.float32)
    of_bits = {tier.bits: tier for tier in tiers}
    places: list[Tensor | None] = []
    for bits in BITS:
        tier = of_bits.get(bits)
        if tier is None:
            places += [None] * 5
        else:
            words = tier.payload.view(torch.int32)
            places += [words, tier.scales, tier.token_ids, tier.table, tier.counts]
    bucketed_attention[(T, kv_heads, splits)](
        *(q.contiguous(), rows, positions, num_tokens, partial, lse, *places),
        *by_bits(tiers, lambda tier: tier.row_stride),
        scale_of(D),
        TIERS=sum(1 << bits for bits in of_bits),
        N=n,
        KV=kv_heads,
        G=group,
        D=D,
        D_PAD=D_pad,
        Q_PAD=max(16, power_of_2(n * group)),
        V=min(4, D // 32 & -(D // 32)),
        PAGE=page,
        SPLITS=splits,
        BOUND=num_tokens is not None,
        CAUSAL=positions is not None,
        PRECISION=precision(q),
        num_warps=4,
    )
    merged = q.new_empty(q.shape) if out is None else out
    padded = merged if D_pad == D else q.new_empty(T, n, heads, D_pad)
    merge_attention[(T * n * heads,)](partial, lse, padded, D=D_pad, SPLITS=splits, num_warps=4, **pdl(q.device))
    return merged if D_pad == D else merged.copy_(padded[..., :D])
