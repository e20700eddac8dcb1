"""Attention to keys and values in memory, dense or in pages: which family of kernels runs it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..choice import Family, Operator
from ..cuda.attention import decode, decode_sm90, decode_units, head_norm_rope, prefill, prefill_sm90
from ..cuda.attention.memory import Memory
from . import torch_forms
from .cache import HeadNorms
from .step import Span

NORM_ROPE_WRITE: Operator[Tensor | None] = Operator(
    "norm_rope_write",
    [
        Family(
            head_norm_rope.NAME,
            lambda device, qkv, norms, rope, memory: head_norm_rope.why_not(qkv, memory, (norms.q, norms.k, *rope)),
            lambda qkv, norms, rope, memory: head_norm_rope.launch(qkv, norms.q, norms.k, norms.eps, rope, memory),
        )
    ],
    lambda qkv, norms, rope, memory: None,
)

DECODE: Operator[Tensor] = Operator(
    "decode_attention",
    [
        Family(
            decode_sm90.NAME,
            lambda device, q, memory, bound, out: decode_sm90.why_not(device, q, memory, out),
            lambda q, memory, bound, out: decode_sm90.launch(q, memory, out),
        ),
        Family(
            decode.NAME,
            lambda device, q, memory, bound, out: decode.why_not(q, memory, out),
            lambda q, memory, bound, out: decode.launch(q, memory, out),
        ),
    ],
    torch_forms.decode_attention,
)

PREFILL: Operator[Tensor] = Operator(
    "prefill_attention",
    [
        Family(
            prefill_sm90.NAME,
            lambda device, q, memory, spans, tiles, out: prefill_sm90.why_not(device, q, memory, tiles, out),
            lambda q, memory, spans, tiles, out: prefill_sm90.launch(q, memory, tiles, out),
        ),
        Family(
            prefill.NAME,
            lambda device, q, memory, spans, tiles, out: prefill.why_not(q, memory, tiles, out),
            lambda q, memory, spans, tiles, out: prefill.launch(q, memory, tiles, out),
        ),
    ],
    lambda q, memory, spans, tiles, out: torch_forms.prefill_attention(q, memory, spans, out),
)


def norm_rope_write(qkv: Tensor, norms: HeadNorms, rope: tuple[Tensor, Tensor], memory: Memory) -> Tensor | None:
    """See cache.FusedWrite."""
    return NORM_ROPE_WRITE(qkv, norms, rope, memory)


def units_of(
    positions: Tensor, num_tokens: Tensor | None, capacity: int, kv_heads: int, out: Tensor | None = None
) -> Tensor | None:
    """Memory.units of a step's positions [T] int64. None: no kernel gains by them, or they have no room in `out`."""
    T, device = len(positions), positions.device
    if not decode_units.serves(T, kv_heads, capacity, device):
        return None
    more = decode_units.extra(kv_heads, device)
    if out is not None and T + more > len(out):
        return None
    return decode_units.launch(positions, num_tokens, capacity, more, out)


def decode_attention(q: Tensor, memory: Memory, bound: int, out: Tensor | None = None) -> Tensor:
    """See torch_forms.decode_attention."""
    return DECODE(q, memory, bound, out)


def prefill_attention(
    q: Tensor, memory: Memory, spans: Sequence[Span], tiles: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """See torch_forms.prefill_attention.

    Args:
        spans: the sequences; may be empty where kernels serve.
        tiles: the same for kernels, [4 n] int32 of prefill.tiles_of. None: they do not serve.
    """
    return PREFILL(q, memory, spans, tiles, out)
