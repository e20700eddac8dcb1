"""Norm, logits and choice of experts for up to 512 tokens: router_logits, then router_topk of gpu_kernels/triton.

The sum over H is sliced among programs, so that few tokens fill the GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...sizes import ceil_div, power_of_2
from ..triton_launch import Tile, pdl, precision
from .topk import choose, why_not_experts

NAME = "Triton router_logits, router_topk"
MAX_TOKENS = 512


def why_not(
    device: torch.device, x: Tensor, norm: Tensor, eps: float, weight: Tensor, K: int, renormalise: bool
) -> str | None:
    """Why the kernels do not route x [T, H] by weight [E, H]; None: they do."""
    if not 0 < x.shape[0] <= MAX_TOKENS:
        return "not 1 to 512 rows"
    if (reason := why_not_experts(weight.shape[0], K)) is not None:
        return reason
    loose = not all(t.is_contiguous() for t in (x, norm, weight))
    return "x, the norm or the weight is not contiguous" if loose else None


def launch(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, K: int, renormalise: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """ids and weights [T, K] of x [T, H], and x normalised."""
    from ttnn_moe.gpu_kernels.triton import router_logits as kernel

    (T, H), E = x.shape, weight.shape[0]
    of = tile(T, x.element_size())
    slices = ceil_div(H, of.constants["BLOCK_H"])
    partial = x.new_empty(slices, T, E, dtype=torch.float32)
    squares = x.new_empty(slices, T, dtype=torch.float32)
    grid = (ceil_div(E, of.constants["BLOCK_E"]), slices, ceil_div(T, of.constants["BLOCK_T"]))
    overlap = pdl(x.device)
    kernel.router_logits[grid](
        *(x, norm, weight, partial, squares, T, E, H),
        PRECISION=precision(x),
        **of.constants,
        num_warps=of.warps,
        num_stages=of.stages,
        **overlap,
    )
    normed = torch.empty_like(x)
    return *choose((None, partial, squares, x, norm, normed), (T, E, H), eps, K, renormalise, slices, overlap), normed


def tile(T: int, itemsize: int) -> Tile:
    """The tile of router_logits. Tuned on an H200."""
    block_h = 512 // itemsize
    if T <= 32:
        return Tile({"BLOCK_T": max(16, power_of_2(T)), "BLOCK_E": 16, "BLOCK_H": block_h}, 4, 1)
    if T <= 64:
        return Tile({"BLOCK_T": 32, "BLOCK_E": 32, "BLOCK_H": block_h}, 4, 1)
    return Tile({"BLOCK_T": 64, "BLOCK_E": 64, "BLOCK_H": block_h}, 8, 1)
