"""The K best experts of each token by logits: gpu_kernels/triton/router_topk.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ...sizes import power_of_2
from ..triton_launch import pdl

NAME = "Triton router_topk"
MAX_EXPERTS = 4096


def why_not(device: torch.device, logits: Tensor, K: int, renormalise: bool) -> str | None:
    if logits.shape[0] == 0:
        return "no rows"
    return None if logits.shape[1] <= MAX_EXPERTS else "more than 4096 experts"


def launch(logits: Tensor, K: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """ids [T, K] int32 and weights [T, K] fp32 of logits [T, E]."""
    from ttnn_moe.gpu_kernels.triton import router_topk as kernel

    T, E = logits.shape
    ids, weights = chosen(logits, T, K)
    kernel.router_topk[(T,)](
        logits.contiguous(),
        None,
        None,
        None,
        None,
        None,
        ids,
        weights,
        0.0,
        T,
        E,
        0,
        K=K,
        RENORMALISE=renormalise,
        SLICES=0,
        E_PAD=power_of_2(E),
        K_PAD=power_of_2(K),
        S_PAD=1,
        H_PAD=1,
        num_warps=warps(E),
        **pdl(logits.device),
    )
    return ids, weights


def warps(E: int) -> int:
    """One warp needs no cross-warp reduction."""
    return 1 if E <= 512 else 4


def chosen(x: Tensor, T: int, K: int) -> tuple[Tensor, Tensor]:
    """Room for ids and weights."""
    return x.new_empty(T, K, dtype=torch.int32), x.new_empty(T, K, dtype=torch.float32)
