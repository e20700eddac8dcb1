"""Attention to packed tiers: which family of kernels runs it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...choice import Family, Operator
from ...cuda.attention import bucketed, bucketed_triton
from ...cuda.attention.tiers import Tier
from . import reference
from .quantise import rotate as rotated


def _form(
    q: Tensor,
    tiers: Sequence[Tier],
    rows: Tensor,
    positions: Tensor | None,
    num_tokens: Tensor | None,
    out: Tensor | None,
    rotate: bool,
) -> Tensor:
    x = rotated(q.float()) if rotate else q
    found = reference.quantized_attention_bucketed(x, tiers, rows, positions)
    found = rotated(found).to(q.dtype) if rotate else found
    return found if out is None else out.copy_(found)


def _triton(
    q: Tensor,
    tiers: Sequence[Tier],
    rows: Tensor,
    positions: Tensor | None,
    num_tokens: Tensor | None,
    out: Tensor | None,
    rotate: bool,
) -> Tensor:
    if not rotate:
        return bucketed_triton.launch(q, tiers, rows, positions, num_tokens, out)
    found = rotated(bucketed_triton.launch(rotated(q), tiers, rows, positions, num_tokens))
    return found if out is None else out.copy_(found)


ATTENTION: Operator[Tensor] = Operator(
    "bucketed_attention",
    [
        Family(
            bucketed.NAME,
            lambda device, q, tiers, rows, positions, num_tokens, out, rotate: bucketed.why_not(
                device, q, tiers, rows, positions
            ),
            bucketed.launch,
        ),
        Family(
            bucketed_triton.NAME,
            lambda device, q, tiers, rows, positions, num_tokens, out, rotate: bucketed_triton.why_not(q, tiers),
            _triton,
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
    rotate: bool = False,
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
        rotate: whether keys and values in the tiers are rotated, as quantise.rotate does. q and the result are not: the
            CUDA C++ kernel rotates both itself.
    """
    return ATTENTION(q, tiers, rows, positions, num_tokens, out, rotate)
