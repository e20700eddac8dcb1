"""Attention to packed tiers: which family of kernels runs it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...choice import Family, Operator
from ...cuda.attention import bucketed, bucketed_triton
from ...cuda.attention.tiers import Tier
from . import reference


def _form(
    q: Tensor,
    tiers: Sequence[Tier],
    rows: Tensor,
    positions: Tensor | None,
    num_tokens: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    found = reference.quantized_attention_bucketed(q, tiers, rows, positions)
    return found if out is None else out.copy_(found)


ATTENTION: Operator[Tensor] = Operator(
    "bucketed_attention",
    [
        Family(
            bucketed.NAME,
            lambda device, q, tiers, rows, positions, num_tokens, out: bucketed.why_not(
                device, q, tiers, rows, positions
            ),
            bucketed.launch,
        ),
        Family(
            bucketed_triton.NAME,
            lambda device, q, tiers, rows, positions, num_tokens, out: bucketed_triton.why_not(q, tiers),
            bucketed_triton.launch,
        ),
    ],
    _form,
)


def quantized_attention_bucketed(
    q: Tensor,
    tiers: Sequence[Tier],
    rows: Tensor,
    positions: Tensor | None = None,
    num_tokens: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of q [T, n, heads, head_dim] to the tokens of all tiers, in one launch -> as q.

    No host reads a count, and a CUDA graph can hold it. The caller checks sizes once: see reference.check_query.

    Args:
        tiers: of one layer, each of other bits, with pages of one size.
        rows: [T] int64, row of the tables of each entry.
        positions: [T] int64, position of the first of the n queries. A query sees no later token. Tokens that are newer
            than the first query lie in tiers of 8 or 16 bits. None: every query sees all tokens of its row.
        num_tokens: [] int32 on the device: the output of later entries is undefined. None: all T.
        out: as q, to write the result to.
    """
    return ATTENTION(q, tiers, rows, positions, num_tokens, out)
