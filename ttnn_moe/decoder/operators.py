"""The operators of a decoder layer as a model calls them, and the families of kernels that run each, in order.

Weights and activations have one dtype: bf16, fp16 or fp32. A norm is fp32 inside and rounds once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import cpu_products, draws
from ..choice import Family, Operator, why_not_kernels
from ..cuda.attention.memory import why_not_heads
from ..cuda.linear import decode_linear, few_rows
from ..cuda.norm import rms_norm as norm_rows
from ..cuda.router import clustered, sliced, topk
from ..cuda.sampling import draw_tokens as drawing
from . import torch_forms

Routed = tuple[Tensor, Tensor, Tensor]  # ids [T, K], weights [T, K], and x normalised [T, H]


def uses_kernels(x: Tensor) -> bool:
    """Whether kernels take tensors of the device and dtype of x. linear_add then overwrites its residual."""
    return why_not_kernels(x.device, x.dtype) is None


def why_not_captured(x: Tensor, heads: int, kv_heads: int, head_dim: int) -> str | None:
    """Why no CUDA graph can hold a model's steps: an operator has no kernel. None: one can.

    Args:
        x: any weight of the model. heads, kv_heads, head_dim: of its attention.
    """
    return why_not_kernels(x.device, x.dtype) or why_not_heads(heads, kv_heads, head_dim)


RMS_NORM: Operator[Tensor] = Operator(
    "rms_norm", [Family(norm_rows.NAME, norm_rows.why_not, norm_rows.launch)], torch_forms.rms_norm
)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension. x [..., H], weight [H]."""
    return RMS_NORM(x, weight, eps)


def _always(device: torch.device, *args: Any) -> None:
    return None


def _why_not_decode_linear(
    device: torch.device, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None
) -> str | None:
    if x.shape[0] == 1 and few_rows.why_not(device, x, weight) is None:
        return f"{few_rows.NAME} is faster for one row"
    return decode_linear.why_not(device, x, weight, bias, norm)


NORM_LINEAR: Operator[Tensor] = Operator(
    "norm_linear",
    [
        Family(
            decode_linear.NAME,
            _why_not_decode_linear,
            lambda x, norm, eps, weight, bias: decode_linear.launch(x, weight, norm=norm, eps=eps),
        ),
        Family(
            few_rows.NAME,
            lambda device, x, norm, eps, weight, bias: few_rows.why_not(device, x, weight, bias, norm=norm),
            lambda x, norm, eps, weight, bias: few_rows.launch(x.contiguous(), weight, bias, norm=norm, eps=eps),
        ),
        Family(
            "rms_norm, GEMM", _always, lambda x, norm, eps, weight, bias: F.linear(rms_norm(x, norm, eps), weight, bias)
        ),
    ],
    torch_forms.norm_linear,
)


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """rms_norm(x [T, K]) weight^T + bias -> [T, N]. norm [K], weight [N, K], bias [N]."""
    return NORM_LINEAR(x, norm, eps, weight, bias)


def _add_in_place(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    if bias is not None:
        residual += bias
    return residual.addmm_(x, weight.t())


LINEAR_ADD: Operator[Tensor] = Operator(
    "linear_add",
    [
        Family(
            decode_linear.NAME,
            decode_linear.why_not,
            lambda x, weight, bias, residual: decode_linear.launch(x, weight, residual=residual),
        ),
        Family(
            few_rows.NAME,
            few_rows.why_not,
            lambda x, weight, bias, residual: few_rows.launch(x.contiguous(), weight, bias, residual=residual),
        ),
        Family("GEMM in place", _always, _add_in_place),
    ],
    torch_forms.linear_add,
)


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """residual [T, N] + x [T, K] weight^T + bias. Kernels write the result over residual and round once."""
    return LINEAR_ADD(x, weight, bias, residual)


LINEAR: Operator[Tensor] = Operator(
    "linear",
    [
        Family(
            decode_linear.NAME,
            lambda device, x, weight: decode_linear.why_not(device, x, weight, None, x),
            decode_linear.launch,
        ),
        Family(few_rows.NAME, few_rows.why_not, lambda x, weight: few_rows.launch(x.contiguous(), weight)),
    ],
    cpu_products.linear,
)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] weight [N, K]^T -> [T, N], rounded once."""
    return LINEAR(x, weight)


ROUTE: Operator[tuple[Tensor, Tensor]] = Operator(
    "route", [Family(topk.NAME, topk.why_not, topk.launch)], torch_forms.route
)


def route(logits: Tensor, K: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """The K best of E experts by logits [T, E]: ids [T, K] int64 (kernel: int32) and weights [T, K] fp32.

    Weights are a softmax over all E. With renormalise the K weights of a token sum to 1. Of equal logits the kernel
    takes the lowest expert first. NaN logits give NaN weights and ids in range.
    """
    return ROUTE(logits, K, renormalise)


def _why_not_few_route(
    device: torch.device, x: Tensor, norm: Tensor, eps: float, weight: Tensor, K: int, renormalise: bool
) -> str | None:
    return topk.why_not_experts(weight.shape[0], K) or few_rows.why_not(device, x, weight, norm=norm)


def _few_route(x: Tensor, norm: Tensor, eps: float, weight: Tensor, K: int, renormalise: bool) -> Routed:
    x = x.contiguous()
    normed = torch.empty_like(x)
    logits = few_rows.launch(x, weight, norm=norm, eps=eps, normed=normed)
    return *route(logits, K, renormalise), normed


def _gemm_route(x: Tensor, norm: Tensor, eps: float, weight: Tensor, K: int, renormalise: bool) -> Routed:
    normed = rms_norm(x, norm, eps)
    return *route(F.linear(normed, weight), K, renormalise), normed


NORM_ROUTE: Operator[Routed] = Operator(
    "norm_route",
    [
        Family(clustered.NAME, clustered.why_not, clustered.launch),
        Family(f"{few_rows.NAME}, router_topk", _why_not_few_route, _few_route),
        Family(sliced.NAME, sliced.why_not, sliced.launch),
        Family("rms_norm, GEMM, route", _always, _gemm_route),
    ],
    torch_forms.norm_route,
)


def norm_route(x: Tensor, norm: Tensor, eps: float, weight: Tensor, K: int, renormalise: bool) -> Routed:
    """Route rms_norm(x [T, H]) by the router's weight [E, H]: ids and weights as `route`, and the normalised x."""
    return NORM_ROUTE(x, norm, eps, weight, K, renormalise)


DRAW_TOKENS: Operator[None] = Operator(
    "draw_tokens", [Family(drawing.NAME, drawing.why_not, drawing.launch)], draws.draw_tokens
)


def draw_tokens(logits: Tensor, tokens: Tensor, asked: Sequence[draws.Draw]) -> None:
    """Put a token that is drawn from a row of logits [R, V] into that row of tokens [R] int64, for each of `asked`.

    The token is the first, in descending order of logits, of equal ones the lowest first, at which the cumulative
    probability exceeds uniform * (probability kept). It depends on its row of logits and its Draw alone.

    Args:
        tokens: holds the first of the largest logits of each of these rows. A row with NaN keeps it, or gets any token.
        asked: of different rows.
    """
    DRAW_TOKENS(logits, tokens, asked)
