"""RMSNorm of rows: gpu_kernels/triton/rms_norm.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ...sizes import power_of_2
from ..triton_launch import pdl

NAME = "Triton rms_norm"


def why_not(device: torch.device, x: Tensor, weight: Tensor, eps: float) -> str | None:
    """Why the kernel does not normalise x; None: it does."""
    if not weight.is_contiguous():
        return "the norm is not contiguous"
    return None if x.dim() == 2 and x.is_contiguous() else "x is not a contiguous matrix"


def launch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, H] / rms(x) * weight [H] -> [T, H], one block a row: fp32 inside, rounded once."""
    from ttnn_moe.gpu_kernels.triton import rms_norm as kernel

    out = torch.empty_like(x)
    T, H = x.shape
    if T:
        block = power_of_2(H)
        most = 8 if T < 2048 else 2  # few rows want low latency, many rows want throughput
        warps = max(1, min(most, block // 256))
        kernel.rms_norm[(T,)](x, weight, out, eps, H, BLOCK=block, num_warps=warps, **pdl(x.device))
    return out
