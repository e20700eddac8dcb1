"""Norm of heads, RoPE and the write of keys and values in one kernel: gpu_kernels/triton/head_norm_rope.py."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...sizes import ceil_div
from ..triton_launch import pdl
from .memory import Memory, why_not_heads, why_not_strides

NAME = "Triton head_norm_rope"
ROWS_ALONE = 2048
"""Rows of heads up to which each has a program; above, 16 share one."""


def why_not(qkv: Tensor, memory: Memory, beside: Sequence[Tensor] = ()) -> str | None:
    """For qkv [T, heads + 2 kv_heads, head_dim]; heads may be 0. beside: norms, cosines and sines."""
    T, rows, D = qkv.shape
    kv_heads = memory.keys.shape[1]
    if T == 0:
        return "no tokens"
    if not all(t.is_contiguous() for t in beside):
        return "norms, cosines or sines are not contiguous"
    return why_not_heads(rows - 2 * kv_heads, kv_heads, D) or why_not_strides(memory.keys, memory.values)


def launch(
    qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float, rope: tuple[Tensor, Tensor], memory: Memory
) -> Tensor:
    """Write keys and values of qkv [T, heads + 2 kv_heads, head_dim] to memory -> q [T, heads, head_dim].

    Args:
        q_norm, k_norm: [head_dim]. rope: cos and sin [T, 1, head_dim / 2].
    """
    from ttnn_moe.gpu_kernels.triton import head_norm_rope as kernel

    T, rows, D = qkv.shape
    kv_heads = memory.keys.shape[1]
    heads = rows - 2 * kv_heads
    q, (cos, sin) = qkv.new_empty(T, heads, D), rope
    block = 1 if T * rows <= ROWS_ALONE else 16
    kernel.head_norm_rope[(ceil_div(T * rows, block),)](
        *(qkv.contiguous(), q_norm, k_norm, cos, sin, memory.rows, memory.positions, memory.num_tokens),
        *(q, memory.keys, memory.values, memory.pages, eps, T, memory.capacity),
        Q=heads,
        KV=kv_heads,
        D=D,
        BOUND=memory.num_tokens is not None,
        BLOCK_R=block,
        PAGE=memory.page,
        STRIDE=memory.stride,
        num_warps=1 if block == 1 else 4,
        **pdl(qkv.device),
    )
    return q
