"""The K best experts of each token by logits: gpu_kernels/triton/router_topk.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ...sizes import power_of_2
from ..triton_launch import pdl

NAME = "Triton router_topk"
MAX_EXPERTS = 4096


def why_not(device: torch.device, logits: Tensor, K: int, renormalise: bool) -> str | None:
    """Why the kernel does not take logits [T, E]; None: it does."""
    return "no rows" if logits.shape[0] == 0 else why_not_experts(logits.shape[1], K)


def why_not_experts(E: int, K: int) -> str | None:
    """Why the kernel does not choose K of E experts; None: it does."""
    if K > E:
        return "K is above the number of experts"
    return None if E <= MAX_EXPERTS else "more than 4096 experts"


def launch(logits: Tensor, K: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """ids [T, K] int32 and weights [T, K] fp32 of logits [T, E]."""
    T, E = logits.shape
    inputs = logits.contiguous(), None, None, None, None, None
    return choose(inputs, (T, E, 0), 0.0, K, renormalise, 0, pdl(logits.device))


def choose(
    inputs: tuple[Tensor | None, ...],
    sizes: tuple[int, int, int],
    eps: float,
    K: int,
    renormalise: bool,
    slices: int,
    overlap: dict[str, bool],
) -> tuple[Tensor, Tensor]:
    """Launch router_topk: ids [T, K] int32 and weights [T, K] fp32.

    Args:
        inputs: logits, partial, squares, x, norm, normed: logits [T, E] alone, or the other five.
        sizes: T, E, H; with logits, H is 0. slices: of the sum over H; with logits 0.
    """
    from ttnn_moe.gpu_kernels.triton import router_topk as kernel

    T, E, H = sizes
    like = inputs[1] if slices else inputs[0]
    assert like is not None
    ids, weights = like.new_empty(T, K, dtype=torch.int32), like.new_empty(T, K, dtype=torch.float32)
    kernel.router_topk[(T,)](
        *(*inputs, ids, weights, eps, T, E, H),
        K=K,
        RENORMALISE=renormalise,
        SLICES=slices,
        E_PAD=power_of_2(E),
        K_PAD=power_of_2(K),
        S_PAD=power_of_2(slices),
        H_PAD=power_of_2(H),
        num_warps=1 if E <= 512 else 4,  # one warp needs no cross-warp reduction
        **overlap,
    )
    return ids, weights
