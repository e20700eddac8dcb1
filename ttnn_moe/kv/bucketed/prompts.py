"""Attention of prompts: bf16 among the tokens of a step, packed tiers for what came before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...choice import Family, Operator
from ...cuda.attention import bucketed_prompt
from ...cuda.attention.bucketed_prompt import Own
from ...cuda.attention.tiers import Tier
from ...sizes import ceil_div
from .quantise import rotate
from .reference import Partial, attend_bucket, merge

QUERIES, APART = 32, 4
"""Queries of a piece of a prompt that say what its tokens weigh: of the last 128, every fourth; of fewer, more of them
(after SnapKV, https://arxiv.org/abs/2404.14469)."""

BLOCK = 512
"""Queries at a time."""


def attend_piece(
    q: Tensor, turned: Tensor, at: Tensor, k: Tensor, v: Tensor, past: Sequence[Tier], row: Tensor
) -> Tensor:
    """Causal attention of queries to the tokens of their step, and to all packed tokens of their row.

    Args:
        q: [n, heads, D]. turned: the same for packed keys.
        at: [n] int64, ascending: which token of the step each query is.
        k, v: [m, kv_heads, D], the step's tokens of the row. past: tiers of one layer; empty: no token came before.
        row: [1] int64.

    Returns:
        as q.
    """
    if not past:
        seen = None if len(q) == len(k) else at[:, None] >= torch.arange(len(k), device=k.device)
        k, v, queries = (x.to(q.dtype).transpose(0, 1)[None] for x in (k, v, q))
        gqa = k.shape[1] != queries.shape[1]
        found = F.scaled_dot_product_attention(queries, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=gqa)
        return found[0].transpose(0, 1)
    out: list[Tensor] = []
    for first in range(0, len(q), BLOCK):
        own = slice(first, first + BLOCK)
        packed = [attend_bucket(tier.bits, turned[None, own], tier, row) for tier in past]
        partials = [Partial(rotate(one.out), one.most, one.total) for one in packed]
        out.append(merge([*partials, _among(q[own], at[own], k, v)])[0].to(q.dtype))
    return torch.cat(out)


PROMPT: Operator[Tensor] = Operator(
    "bucketed_prompt",
    [
        Family(
            bucketed_prompt.NAME,
            lambda device, q, at, own, which, k, v, past, row, q_scale: (
                "it serves a packed past" if own is None or not past else None
            ),
            lambda q, at, own, which, k, v, past, row, q_scale: bucketed_prompt.launch(
                q, at, own, which, len(k), past, row, q_scale
            ),
        )
    ],
    lambda q, at, own, which, k, v, past, row, q_scale: attend_piece(
        q, rotate(q.float() * q_scale), at, k, v, past, torch.tensor([row], device=q.device)
    ),
)


def prompt_attention(
    q: Tensor,
    at: Tensor,
    own: Own | None,
    which: int,
    k: Tensor,
    v: Tensor,
    past: Sequence[Tier],
    row: int,
    q_scale: Tensor,
) -> Tensor:
    """See attend_piece.

    Args:
        own: the step's tokens as the kernel takes them, this piece being number `which`. None: no kernel serves.
        q_scale: [D] fp32, what queries are multiplied by before they are rotated.
    """
    return PROMPT(q, at, own, which, k, v, past, row, q_scale)


def _among(q: Tensor, at: Tensor, k: Tensor, v: Tensor) -> Partial:
    """q [n, heads, D] to the tokens of the step: [1, n, heads, ..]."""
    scores = _scores(q, k).masked_fill(at[:, None, None, None] < torch.arange(len(k), device=k.device), float("-inf"))
    most = scores.amax(-1)
    p = torch.exp(scores - most[..., None])
    out = torch.einsum("nkgs,skd->nkgd", p, v.float())
    return Partial(out.flatten(1, 2)[None], most.flatten(1, 2)[None], p.sum(-1).flatten(1, 2)[None])


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """[n, kv_heads, group, m] fp32 of q [n, heads, D] and k [m, kv_heads, D]."""
    grouped = q.float().unflatten(1, (k.shape[1], -1))
    return torch.einsum("nkgd,skd->nkgs", grouped, k.float()) / q.shape[-1] ** 0.5


def observing(n: int) -> slice:
    """Which of a piece's n queries say what its tokens weigh; the last is one of them."""
    apart = max(1, min(APART, n // QUERIES))
    first = n - 1 - apart * (min(QUERIES, ceil_div(n, apart)) - 1)
    return slice(first, n, apart)


def observed(q: Tensor, turned: Tensor, k: Tensor, high: Tensor | None) -> Tensor:
    """What the observing queries of a piece give to tokens: [h + m] fp32, the sum of the attention among these tokens
    alone, over queries and heads.

    Args:
        q: [n, heads, D], all queries of the piece. turned: the observing ones, for packed keys.
        k: [n, kv_heads, D], its keys.
        high: [h, kv_heads, D], packed keys that came before. None: none.
    """
    m, own = len(k), observing(len(q))
    at = torch.arange(m, device=q.device)
    scores = _scores(q[own], k).masked_fill(at[own, None, None, None] < at, float("-inf"))
    if high is not None:
        scores = torch.cat((_scores(turned, high), scores), -1)
    return scores.softmax(-1).sum((0, 1, 2))
