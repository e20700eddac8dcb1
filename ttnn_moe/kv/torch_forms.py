"""Writing keys and values, and attention to them, in plain torch: the definitions of what kernels do."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cuda.attention.memory import Memory
from ..sizes import ceil_div
from .step import Span

MIN = 64
"""Sequences of no more tokens attend together, whatever their lengths: a group costs more than their padding."""


def keep(memory: Memory, k: Tensor, v: Tensor) -> None:
    """Write keys and values [T, kv_heads, head_dim] of the step's tokens."""
    rows, at = memory.rows, memory.positions
    if memory.pages is not None:
        rows, at = memory.pages[rows, at // memory.page].long(), at % memory.page
    memory.keys[rows, :, at] = k
    memory.values[rows, :, at] = v


def dense(memory: Memory, rows: Tensor | int, bound: int) -> tuple[Tensor, Tensor]:
    """Keys and values 0 .. bound - 1 of these rows [n], or of one: [n, kv_heads, bound, head_dim]."""
    if memory.pages is None:
        return memory.keys[rows, :, :bound], memory.values[rows, :, :bound]
    taken = memory.pages[rows, : ceil_div(bound, memory.page)]
    k, v = (kept[taken].transpose(-4, -3).flatten(-3, -2)[..., :bound, :] for kept in (memory.keys, memory.values))
    return k, v


def decode_attention(q: Tensor, memory: Memory, bound: int, out: Tensor | None = None) -> Tensor:
    """Attention of one query a sequence, q [T, heads, head_dim], to the keys 0 .. position of its row.

    On a CPU, where the host knows the positions, the cost follows the tokens held: see `alike`. Elsewhere, and under
    torch.compile, it follows T * bound.

    Args:
        bound: every position is below it.
        out: as q, to write the result to.
    """
    if q.device.type != "cpu" or torch.compiler.is_compiling():
        attended = _decode(q, memory, bound)
        return attended if out is None else out.copy_(attended)
    out = torch.empty_like(q) if out is None else out
    for places, n in alike([position + 1 for position in memory.positions.tolist()]):
        if len(places) == len(q):
            out.copy_(_decode(q, memory, n))
        else:
            at = torch.tensor(places)
            out[at] = _decode(q[at], replace(memory, rows=memory.rows[at], positions=memory.positions[at]), n)
    return out


def alike(lengths: Sequence[int]) -> Iterator[tuple[list[int], int]]:
    """Sequences that attend together, by index, and the longest of each group: at most twice its shortest, and MIN."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    while order:
        longest = lengths[order[-1]]
        first = bisect_left(order, longest // 2, key=lengths.__getitem__) if longest > MIN else 0
        yield sorted(order[first:]), longest
        del order[first:]


def _decode(q: Tensor, memory: Memory, bound: int) -> Tensor:
    T, heads, _ = q.shape
    kv_heads = memory.keys.shape[1]
    mask = (torch.arange(bound, device=q.device) <= memory.positions[:, None])[:, None, None]
    k, v = dense(memory, memory.rows, bound)
    unseen = ~mask.transpose(2, 3)
    # a masked value still counts as 0 * value, which is NaN where a value is
    k, v = k.masked_fill(unseen, 0), v.masked_fill(unseen, 0)
    # the query heads of one key/value head are its queries: no key is repeated
    grouped = q.unflatten(1, (kv_heads, heads // kv_heads))
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).reshape(q.shape)


def prefill_attention(q: Tensor, memory: Memory, spans: Sequence[Span], out: Tensor | None = None) -> Tensor:
    """Causal attention of packed sequences q [T, heads, head_dim] to the keys of their rows.

    Args:
        out: as q, to write the result to; tokens of no span stay as they are.
    """
    gqa = q.shape[1] != memory.keys.shape[1]
    out = torch.empty_like(q) if out is None else out
    for span in spans:
        own = slice(span.first, span.first + span.n)
        k, v = dense(memory, span.row, span.past + span.n)
        out[own] = F.scaled_dot_product_attention(
            q[own].transpose(0, 1)[None],
            k[None],
            v[None],
            attn_mask=_mask(span.n, span.past, q.device) if span.past else None,
            is_causal=span.past == 0,
            enable_gqa=gqa,
        )[0].transpose(0, 1)
    return out


@lru_cache(maxsize=1)
@torch.inference_mode(False)  # what is kept also serves calls that record gradients
def _mask(n: int, past: int, device: torch.device) -> Tensor:
    """[n, past + n] bool, True = attend. Every layer of a step needs the same one, and no later step does."""
    return torch.ones(n, past + n, dtype=torch.bool, device=device).tril(past)
