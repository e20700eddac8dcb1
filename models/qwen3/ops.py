"""The model's small operators, each in plain torch; for CUDA tensors the Triton form of kernels.py where there is one.

The torch form is the definition. The Triton form is taken for a CUDA tensor (with TRITON_INTERPRET=1 for any tensor but
bf16 ones, which the interpreter cannot multiply) where triton is installed, the GPU is sm_80 or newer and sizes fit: a
head_dim that is a power of two from 16 to 256, at most 64 query heads per key/value head, at most 4096 experts.
`plain()` takes the torch form everywhere.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from . import decode_linear

if TYPE_CHECKING:
    from .cache import Span

FEW_TOKENS = 2
"""Linear layers of at most this many rows run on the CUDA cores, with what surrounds them."""

ROUTER_TOKENS = 512
"""The router of at most this many tokens is sliced."""

_PLAIN: ContextVar[bool] = ContextVar("plain", default=False)


@contextmanager
def plain() -> Iterator[None]:
    """Torch forms only, on every device: what the others are compared with."""
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


@dataclass(frozen=True)
class Place:
    """Where the keys and values of a step's T tokens belong in one layer of a cache, dense or in pages.

    Attributes:
        keys, values: [rows, kv heads, capacity, head_dim]; with pages [pages, kv heads, page, head_dim].
        rows, positions: [T] int64.
        num_tokens: [] int32 or None: tokens past it are not kept (the torch forms need rows where they may be).
        pages: [rows, capacity / page] int32: key n of a row is key n % page of its page n / page. None: dense.
    """

    keys: Tensor
    values: Tensor
    rows: Tensor
    positions: Tensor
    num_tokens: Tensor | None = None
    pages: Tensor | None = None

    @property
    def page(self) -> int:
        """Tokens of a page; 0: dense."""
        return 0 if self.pages is None else self.keys.shape[2]

    @property
    def capacity(self) -> int:
        """Tokens of a row, at most."""
        return self.keys.shape[2] * (1 if self.pages is None else self.pages.shape[1])

    def dense(self, rows: Tensor | int, bound: int) -> tuple[Tensor, Tensor]:
        """Keys and values 0 .. bound - 1 of these rows [n], or of one: [n, kv heads, bound, head_dim]."""
        if self.pages is None:
            return self.keys[rows, :, :bound], self.values[rows, :, :bound]
        taken = self.pages[rows, : -(-bound // self.page)]
        k, v = (kept[taken].transpose(-4, -3).flatten(-3, -2)[..., :bound, :] for kept in (self.keys, self.values))
        return k, v

    def keep(self, k: Tensor, v: Tensor) -> None:
        """Write keys and values [T, kv heads, head_dim] of the step's tokens."""
        rows, at = self.rows, self.positions
        if self.pages is not None:
            rows, at = self.pages[rows, at // self.page].long(), at % self.page
        self.keys[rows, :, at] = k
        self.values[rows, :, at] = v


@dataclass(frozen=True)
class HeadNorms:
    """Weights [head_dim] of the RMSNorm of each query and key head, and its eps."""

    q: Tensor
    k: Tensor
    eps: float


def fast(x: Tensor) -> bool:
    """Whether tensors like x are served by Triton kernels, sizes permitting."""
    if torch.compiler.is_compiling() or _PLAIN.get():
        return False
    if x.is_cuda:
        return _has_triton() and _capability(x.device.index) >= (8, 0)
    return x.dtype != torch.bfloat16 and os.environ.get("TRITON_INTERPRET") == "1" and _has_triton()


def fast_heads(x: Tensor, heads: int, kv_heads: int, head_dim: int) -> bool:
    """Whether attention with these heads has Triton kernels."""
    return fast(x) and head_dim in (16, 32, 64, 128, 256) and heads // kv_heads <= 64


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def _kernels() -> ModuleType:
    from . import kernels

    return kernels


def _hopper() -> ModuleType:
    from . import hopper_attention

    return hopper_attention


def attention_scale(D: int) -> float:
    """What kernels multiply scores by: they take powers of two."""
    return math.log2(math.e) / math.sqrt(D)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, H] / rms(x) * weight [H]; fp32 inside, one rounding."""
    if fast(x) and x.dim() == 2 and x.is_contiguous():
        return _kernels().rms_norm(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer behind a norm: rms_norm(x [T, K]) weight^T [K, N] + bias -> [T, N]."""
    if _few(x, weight):
        return _kernels().few_linear(x.contiguous(), weight, bias, norm=norm, eps=eps)
    if bias is None and fast(x) and decode_linear.serves(x, weight, norm):
        return decode_linear.decode_linear(x, weight, norm=norm, eps=eps)
    return F.linear(rms_norm(x, norm, eps), weight, bias)


def _few(x: Tensor, weight: Tensor) -> bool:
    return 0 < x.shape[0] <= FEW_TOKENS and fast(x) and weight.is_contiguous()


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """residual [T, N] + x [T, K] weight^T + bias; the fast form writes it over residual and rounds once."""
    if not fast(x):
        return residual + F.linear(x, weight, bias)
    if _few(x, weight):
        return _kernels().few_linear(x.contiguous(), weight, bias, residual=residual)
    if bias is None and decode_linear.serves(x, weight, residual):
        return decode_linear.decode_linear(x, weight, residual=residual)
    if bias is not None:
        residual += bias
    return residual.addmm_(x, weight.t())


def route(logits: Tensor, K: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """The K best of E experts by logits [T, E]: ids [T, K] int64 (fast form: int32) and weights [T, K] fp32.

    Weights are a softmax over all E; with renormalise they are divided by their sum. Of equal logits the fast form
    takes the lowest expert first; NaN logits give NaN weights and ids in range.
    """
    if fast(logits) and logits.shape[0] and logits.shape[1] <= 4096:
        return _kernels().router_topk(logits.contiguous(), K, renormalise)
    weights, ids = torch.topk(torch.softmax(logits, dim=-1, dtype=torch.float32), K, dim=-1)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return ids, weights


def norm_route(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, K: int, renormalise: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Route rms_norm(x [T, H]) by the router's weight [E, H]: ids and weights as `route`, and the normalised x."""
    T, E = x.shape[0], weight.shape[0]
    if _few(x, weight) and E <= 4096:
        normed = torch.empty_like(x)
        logits = _kernels().few_linear(x.contiguous(), weight, None, norm=norm, eps=eps, normed=normed)
    elif 0 < T <= ROUTER_TOKENS and E <= 4096 and fast(x) and x.is_contiguous() and weight.is_contiguous():
        return _kernels().router(x, norm, eps, weight, K, renormalise)
    else:
        normed = rms_norm(x, norm, eps)
        logits = F.linear(normed, weight)
    return *route(logits, K, renormalise), normed


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE: turn pairs (x[i], x[i + head_dim/2]). x [T, heads, head_dim]; cos, sin [T, 1, head_dim/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def head_norm_rope(
    qkv: Tensor, kv_heads: int, norms: HeadNorms, rope: tuple[Tensor, Tensor], place: Place | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Normalise and turn the query and key heads of qkv [T, heads + 2 kv_heads, head_dim].

    Args:
        rope: cos and sin [T, 1, head_dim / 2].
        place: where to write k and v; None: they are returned.

    Returns:
        q [T, heads, head_dim]; k and v [T, kv_heads, head_dim], or None where they are in their place.
    """
    T, rows, D = qkv.shape
    heads = rows - 2 * kv_heads
    if place is not None and T and fast_heads(qkv, heads, kv_heads, D):
        return _kernels().head_norm_rope(qkv, kv_heads, norms, rope, place), None, None
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    q = rotate(F.rms_norm(q, norms.q.shape, norms.q, norms.eps), *rope)
    k = rotate(F.rms_norm(k, norms.k.shape, norms.k, norms.eps), *rope)
    if place is None:
        return q, k, v
    place.keep(k, v)
    return q, None, None


def decode_attention(q: Tensor, place: Place, bound: int, mask: Tensor | None, out: Tensor | None = None) -> Tensor:
    """Attend with one query a sequence, q [T, heads, head_dim], to the keys 0 .. position of its row.

    Args:
        bound: at least every position + 1.
        mask: [T, 1, 1, bound] bool, True = attend: token t is then that of cache row t. None: rows are as place.rows
            says, and lengths are read on the device.
        out: as q, to write the result to.
    """
    T, heads, D = q.shape
    keys, values = place.keys, place.values
    kv_heads = keys.shape[1]
    if T and fast_heads(q, heads, kv_heads, D):
        return _kernels().decode_attention(q, place, out)
    if mask is None:
        mask = (torch.arange(bound, device=q.device) <= place.positions[:, None])[:, None, None]
        k, v = place.dense(place.rows, bound)
        if place.pages is not None:  # a masked key still counts as 0 * what another sequence left there
            unseen = ~mask.transpose(2, 3)
            k, v = k.masked_fill(unseen, 0), v.masked_fill(unseen, 0)
    else:
        k, v = keys[:T, :, :bound], values[:T, :, :bound]
    # the query heads of one key/value head are its queries: no key is repeated
    grouped = q.unflatten(1, (kv_heads, heads // kv_heads))
    attended = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).reshape(q.shape)
    return attended if out is None else out.copy_(attended)


def prefill_attention(
    q: Tensor, place: Place, spans: Sequence[Span], tiles: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """Causal attention of packed prompts q [T, heads, head_dim] to the keys of their rows.

    Args:
        spans: the sequences of the step; may be empty where there are tiles.
        tiles: the same for the kernels, see prefill_tiles; None: they do not serve, and spans have masks.
        out: as q, to write the result to where it may: tokens of no sequence stay as they are.
    """
    keys, values = place.keys, place.values
    if tiles is not None and _hopper().serves(q, place):
        return _hopper().prefill_attention(q, place, tiles, out)
    gqa = q.shape[1] != keys.shape[1]
    first, n = (spans[0].row, spans[0].n) if spans else (0, 0)
    even = all(s.past == 0 and s.n == n and s.row == first + i for i, s in enumerate(spans))
    if q.is_cuda and even and n > 1 and place.pages is None:
        # prompts of one length in neighbouring rows: one batch, for the vendor's kernel
        rows = slice(first, first + len(spans))
        batch = q.view(len(spans), n, *q.shape[1:]).transpose(1, 2)
        k, v = keys[rows, :, :n], values[rows, :, :n]
        out = F.scaled_dot_product_attention(batch, k, v, is_causal=True, enable_gqa=gqa)
        return out.transpose(1, 2).reshape(q.shape)
    if tiles is not None:
        return _kernels().prefill_attention(q, place, tiles, out)
    out = torch.empty_like(q) if out is None else out
    for span in spans:
        own = slice(span.first, span.first + span.n)
        k, v = place.dense(span.row, span.past + span.n)
        out[own] = F.scaled_dot_product_attention(
            q[own].transpose(0, 1)[None],
            k[None],
            v[None],
            attn_mask=span.mask,
            is_causal=span.mask is None,
            enable_gqa=gqa,
        )[0].transpose(0, 1)
    return out


def prefill_tiles(spans: Sequence[Span], keys: Tensor) -> Tensor:
    """What the kernels of prefill_attention read of a step's sequences, on the host; keys: a cache's."""
    return torch.tensor(tile_numbers(spans, keys), dtype=torch.int32).view(-1, 4)


def tile_numbers(spans: Sequence[Span], keys: Tensor) -> list[int]:
    """The same, four numbers a tile."""
    tiles = _kernels().prefill_tiles(((span.first, span.n, span.past, span.row) for span in spans), prefill_rows(keys))
    return [number for tile in tiles for number in tile]


def prefill_rows(keys: Tensor) -> int:
    """Queries of a tile of prefill_tiles."""
    return _kernels().prefill_tile(keys.shape[-1], keys.element_size()).constants["BLOCK_M"]
