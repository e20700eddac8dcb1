"""Attention of prompts: bf16 among the tokens of a step, packed tiers for what came before."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ...choice import Family, Operator
from ...cuda.attention import bucketed_prompt, bucketed_unpack
from ...cuda.attention.bucketed_prompt import Own
from ...cuda.attention.bucketed_unpack import Room
from ...cuda.attention.tiers import Tier
from ...sizes import ceil_div
from ..attention import prefill_attention
from ..step import Span
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
        k, v: [m, kv_heads, D], the step's tokens of the row. past: tiers of one layer.
        row: [1] int64.

    Returns:
        as q.
    """
    out: list[Tensor] = []
    for first in range(0, len(q), BLOCK):
        own = slice(first, first + BLOCK)
        packed = [attend_bucket(tier.bits, turned[None, own], tier, row) for tier in past]
        partials = [Partial(rotate(one.out), one.most, one.total) for one in packed]
        out.append(merge([*partials, _among(q[own], at[own], k, v)])[0].to(q.dtype))
    return torch.cat(out)


def attend_first(q: Tensor, at: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """attend_piece where no token came before the step's."""
    seen = None if len(q) == len(k) else at[:, None] >= torch.arange(len(k), device=k.device)
    k, v, queries = (x.to(q.dtype).transpose(0, 1)[None] for x in (k, v, q))
    gqa = k.shape[1] != queries.shape[1]
    found = F.scaled_dot_product_attention(queries, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=gqa)
    return found[0].transpose(0, 1)


def attend_unpacked(
    q: Tensor, k: Tensor, v: Tensor, past: Sequence[Tier], row: int, q_scale: Tensor, room: Room
) -> Tensor:
    """See attend_piece; of all queries of a piece."""
    bucketed_unpack.unpack(room, k, v, past, row, q_scale)
    return prefill_attention(q, room.memory, [Span(0, 0, room.n, room.past)], room.tiles)


PROMPT: Operator[Tensor] = Operator(
    "bucketed_prompt",
    [
        Family(
            bucketed_unpack.NAME,
            lambda device, q, at, own, which, k, v, past, row, q_scale, room: (
                "it serves long pieces, all of their queries" if room is None else None
            ),
            lambda q, at, own, which, k, v, past, row, q_scale, room: attend_unpacked(
                q, k, v, past, row, q_scale, room
            ),
        ),
        Family(
            bucketed_prompt.NAME,
            lambda device, q, at, own, which, k, v, past, row, q_scale, room: (
                "keys and values are not packed for it" if own is None else None
            ),
            lambda q, at, own, which, k, v, past, row, q_scale, room: bucketed_prompt.launch(
                q, at, own, which, len(k), past, row, q_scale
            ),
        ),
    ],
    lambda q, at, own, which, k, v, past, row, q_scale, room: attend_piece(
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
    room: Room | None,
) -> Tensor:
    """See attend_piece.

    Args:
        past: tiers of one layer; empty: no token came before.
        own: the step's tokens as bucketed_prompt takes them, this piece being number `which`. None: it does not serve.
        q_scale: [D] fp32, what queries are multiplied by before they are rotated.
        room: of the piece, where it is long and q has all of its queries.
    """
    return PROMPT(q, at, own, which, k, v, past, row, q_scale, room) if past else attend_first(q, at, k, v)


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


def observed(q: Tensor, k: Tensor, high: Tensor | None) -> Tensor:
    """What the observing queries of a piece give to tokens: [h + n], the sum of the attention among these tokens alone,
    over queries and heads. Few launches: a layer of a long prompt waits for the host otherwise.

    Args:
        q: [n, heads, D], all queries of the piece.
        k: [n, kv_heads, D], its keys.
        high: [h, kv_heads, D], fp32 keys that came before, as k. None: none.
    """
    n, kv_heads, _ = k.shape
    queries = q[observing(n)].unflatten(1, (kv_heads, -1)).transpose(0, 1).float().flatten(1, 2)
    keys = k.float() if high is None else torch.cat((high, k))
    return _given(queries, keys.permute(1, 2, 0), n)


SCORES = 1 << 24
"""Scores that observed_in_layers makes at a time."""


def observed_in_layers(queries: Tensor, k: Tensor) -> Tensor:
    """What the observing queries of a piece without a past give to its tokens, over heads and layers too: [n] fp32.

    Args:
        queries: [layers, observing, heads, D]. k: [layers, n, kv_heads, D], keys of the piece.
    """
    _, n, kv_heads, _ = k.shape
    total = torch.zeros(n, device=k.device)
    at_a_time = max(1, SCORES // (queries.shape[1] * queries.shape[2] * n))
    for asked, keys in zip(queries.split(at_a_time), k.split(at_a_time), strict=True):
        asked = asked.unflatten(2, (kv_heads, -1)).transpose(1, 2).float().flatten(2, 3).flatten(0, 1)
        total += _given(asked, keys.float().permute(0, 2, 3, 1).flatten(0, 1), n)
    return total


def _given(queries: Tensor, keys: Tensor, n: int) -> Tensor:
    """What queries of a piece of n tokens give to keys, summed: [m] fp32.

    Args:
        queries: [batch, observing * group, D] fp32. keys: [batch, D, m] fp32, the last n of the piece.
    """
    own = observing(n)
    scores = torch.baddbmm(queries.new_empty(1, 1, 1), queries, keys, beta=0, alpha=queries.shape[-1] ** -0.5)
    later = _later(n - own.start, own.step, queries.device)
    scores.unflatten(1, (len(later), -1))[..., own.start - n :].masked_fill_(later[:, None], float("-inf"))
    return scores.softmax(-1).sum((0, 1))


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # what is kept also serves calls that record gradients
def _later(n: int, apart: int, device: torch.device) -> Tensor:
    """Which of n tokens come after each of those `apart`."""
    at = torch.arange(n, device=device)
    return at[::apart, None] < at
