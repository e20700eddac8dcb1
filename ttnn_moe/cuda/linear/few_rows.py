"""Linear layers of one or two rows on the CUDA cores: gpu_kernels/triton/few_linear.py."""

from __future__ import annotations

import torch
from torch import Tensor

from ...sizes import ceil_div, power_of_2
from ..triton_launch import pdl

NAME = "Triton few_linear"
MAX_ROWS = 2
"""Rows up to which the CUDA cores are faster than a GEMM. `launch` takes up to four, for tests."""


def why_not(
    device: torch.device,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
) -> str | None:
    """For x [T, K], weight [N, K], bias [N], residual [T, N] and norm [K]."""
    if x.shape[0] > MAX_ROWS:
        return f"more than {MAX_ROWS} rows"
    if x.shape[0] == 0:
        return "no rows"
    given = {"weight": weight, "bias": bias, "residual": residual, "norm": norm}
    loose = [name for name, tensor in given.items() if tensor is not None and not tensor.is_contiguous()]
    return f"the {loose[0]} is not contiguous" if loose else None


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    normed: Tensor | None = None,
) -> Tensor:
    """x weight^T + bias + residual, of rms_norm(x) with a norm. The result overwrites the residual.

    Args:
        x: [T, K], up to 4 rows (why_not allows MAX_ROWS); contiguous, as all others.
        weight: [N, K]. bias: [N]. norm: [K]. residual: [T, N].
        normed: [T, K], written with the normalised x.
    """
    from ttnn_moe.gpu_kernels.triton import few_linear as kernel

    (T, K), N = x.shape, weight.shape[0]
    out = residual if residual is not None else x.new_empty(T, N)
    block_n, block_k, warps = tile(T, N, K)
    kernel.few_linear[(ceil_div(N, block_n),)](
        *(x, norm, weight, bias, residual, out, normed, eps, N),
        T=T,
        K=K,
        NORM=norm is not None,
        BIAS=bias is not None,
        ADD=residual is not None,
        KEEP=normed is not None,
        T_PAD=power_of_2(T),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=warps,
        **pdl(x.device),
    )
    return out


def tile(T: int, N: int, K: int) -> tuple[int, int, int]:
    """(BLOCK_N, BLOCK_K, warps): few weight rows a program, so that every multiprocessor has programs."""
    block_n = 4 if N >= 2048 else 2
    block_k = min(2048 if T <= 2 else 512, power_of_2(K))
    return block_n, block_k, max(1, min(8, block_k // 256))
