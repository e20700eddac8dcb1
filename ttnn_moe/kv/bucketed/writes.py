"""Writes into packed tiers: which family of kernels runs them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...choice import Family, Operator
from ...cuda.attention import bucketed_write
from ...cuda.attention.bucketed_write import Change, Ring, Staged
from ...cuda.attention.tiers import Layers
from ..cache import HeadNorms
from ..step import DecodeStep
from . import moves
from .quantise import rotate
from .storage import put_tokens


def _put(k: Tensor, v: Tensor, ring: Ring, step: DecodeStep) -> None:
    tier, slots = ring.tier, ring.slots_of(step.positions)
    pages = tier.table[step.rows, slots // tier.page].long()
    k, v = (x.to(torch.bfloat16).float() for x in (k, v))
    put_tokens(tier, pages, slots % tier.page, rotate(k / ring.key_scale), rotate(v))
    if ring.names:
        tier.token_ids[pages, slots % tier.page] = step.positions.int()


WRITE: Operator[Tensor | None] = Operator(
    "bucketed_norm_rope_write",
    [
        Family(
            bucketed_write.NAME,
            lambda device, qkv, norms, rope, ring, step: bucketed_write.why_not(
                device, qkv, None, step.rows, step.positions, step.num_tokens, (norms.q, norms.k, *rope)
            ),
            lambda qkv, norms, rope, ring, step: bucketed_write.launch(
                qkv, norms.q, norms.k, norms.eps, rope, ring, step.rows, step.positions, step.num_tokens
            ),
        )
    ],
    lambda qkv, norms, rope, ring, step: None,
)

PUT: Operator[None] = Operator(
    "bucketed_put",
    [
        Family(
            bucketed_write.NAME,
            lambda device, k, v, ring, step: bucketed_write.why_not(
                device, k, v, step.rows, step.positions, step.num_tokens
            ),
            lambda k, v, ring, step: bucketed_write.put(k, v, ring, step.rows, step.positions, step.num_tokens),
        )
    ],
    _put,
)

MOVE: Operator[None] = Operator(
    "bucketed_move",
    [
        Family(
            bucketed_write.NAME,
            lambda device, payload, high, tiers, ring, changes, staged: bucketed_write.why_not_move(device, high),
            lambda payload, *rest: bucketed_write.move(*rest),
        )
    ],
    lambda payload, *rest: moves.move(*rest),
)


def norm_rope_write(
    qkv: Tensor, norms: HeadNorms, rope: tuple[Tensor, Tensor], ring: Ring, step: DecodeStep
) -> Tensor | None:
    """See kv.cache.FusedWrite: one token a row, into the high tier."""
    return WRITE(qkv, norms, rope, ring, step)


def put(k: Tensor, v: Tensor, ring: Ring, step: DecodeStep) -> None:
    """Write keys and values [T, kv_heads, D] of one token a row into the high tier: in bf16, rotated, quantised."""
    PUT(k, v, ring, step)


def move(high: Layers, tiers: Sequence[Layers], ring: Ring, changes: Sequence[Change], staged: Staged | None) -> None:
    """See moves.move."""
    MOVE(high.together.payload, high, tiers, ring, changes, staged)
