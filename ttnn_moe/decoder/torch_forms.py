"""The operators of a decoder layer in plain torch: their definitions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cpu_products import linear
from ..kv.cache import HeadNorms


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See operators.rms_norm."""
    return F.rms_norm(x, weight.shape, weight, eps)


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See operators.norm_linear."""
    return linear(rms_norm(x, norm, eps), weight, bias)


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """See operators.linear_add."""
    return residual + linear(x, weight, bias)


def route(logits: Tensor, K: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """See operators.route."""
    weights, ids = torch.topk(torch.softmax(logits, dim=-1, dtype=torch.float32), K, dim=-1)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return ids, weights


def norm_route(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, K: int, renormalise: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See operators.norm_route."""
    normed = rms_norm(x, norm, eps)
    return *route(linear(normed, weight), K, renormalise), normed


def head_norm_rope(
    qkv: Tensor, kv_heads: int, norms: HeadNorms, rope: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise and rotate the query and key heads of qkv [T, heads + 2 kv_heads, head_dim].

    A cache with a kernel for this is a kv.cache.FusedWrite.

    Args:
        rope: cos and sin [T, 1, head_dim / 2].

    Returns:
        q [T, heads, head_dim]; k and v [T, kv_heads, head_dim].
    """
    q, k, v = qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    q = rotate(rms_norm(q, norms.q, norms.eps), *rope)
    k = rotate(rms_norm(k, norms.k, norms.eps), *rope)
    return q, k, v


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE: turn pairs (x[i], x[i + head_dim/2]). x [T, heads, head_dim]; cos, sin [T, 1, head_dim/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
