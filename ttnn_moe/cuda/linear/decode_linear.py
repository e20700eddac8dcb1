"""Linear layers of a decode step of up to 32 rows on Hopper: gpu_kernels/cuda/sm90/decode_linear.cu."""

from __future__ import annotations

from ctypes import c_float, c_int32
from functools import lru_cache

import torch
from torch import Tensor

from ...sizes import power_of_2
from .. import device as devices
from .. import maps
from ..arch import HOPPER, why_not_hopper, why_not_words
from ..jit import load, spec

NAME = "CUDA C++ decode_linear (sm_90a)"
MAX_ROWS = 32
SLICE, TILE = 512, 64


def rows_of(T: int) -> int:
    """Rows of the kernel for T: 8, 16 or 32."""
    return max(8, power_of_2(T))


def shared_memory(rows: int) -> int:
    """Bytes of a block: alignment to 1024 bytes, weights, rows, their squares, barriers."""
    return 1024 + 8 * 64 * 128 + 8 * rows * 128 + 4 * rows + 8 * 8


def blocks(rows: int) -> int:
    """Resident blocks of a multiprocessor; with more than one wave, cuBLAS is faster. CUDA keeps 1 KiB of each."""
    return (228 << 10) // (shared_memory(rows) + 1024)


def why_not(device: torch.device, x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor) -> str | None:
    """For x [T, K], weight [N, K], and a norm [K] or a residual [T, N]."""
    T = x.shape[0]
    N, K = weight.shape
    if not 0 < T <= MAX_ROWS:
        return "not 1 to 32 rows"
    if bias is not None:
        return "it adds no bias"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return "neither bf16 nor fp16"
    if K % SLICE or K > 8 * SLICE:
        return "the input size is no multiple of 512 up to 4096"
    if N % TILE:
        return "the output size is no multiple of 64"
    reason = why_not_hopper(device)
    if reason is not None:
        return reason
    if N // TILE * (K // SLICE) > blocks(rows_of(T)) * devices.gpu(device).multiprocessors:
        return "more than one wave of blocks: cuBLAS is faster"
    return why_not_words(x.dtype, x, weight, other)


def launch(
    x: Tensor, weight: Tensor, *, norm: Tensor | None = None, eps: float = 0.0, residual: Tensor | None = None
) -> Tensor:
    """rms_norm(x) weight^T, or x weight^T + residual [T, N], which the result overwrites."""
    (T, K), N = x.shape, weight.shape[0]
    out = x.new_empty(T, N) if residual is None else residual
    with torch.cuda.device(x.device):
        _launch(x.dtype, K // SLICE, T, N, norm is not None, residual is not None, eps, x.device.index)(
            load.stream(x.device.index),
            maps.linear_map(weight),
            x.data_ptr(),
            0 if norm is None else norm.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            out.data_ptr(),
        )
    return out


@lru_cache(maxsize=1024)
def _launch(
    dtype: torch.dtype, splits: int, T: int, N: int, norm: bool, add: bool, eps: float, device: int
) -> load.Launch:
    rows = rows_of(T)
    return load.Launch(
        spec_of(splits, dtype, norm, add, rows),
        device,
        (N // TILE * splits,),
        128,
        c_float(eps),
        c_int32(T),
        c_int32(N),
        shared_memory=shared_memory(rows),
        cluster=splits,
        overlap=True,
    )


def spec_of(splits: int, dtype: torch.dtype, norm: bool, add: bool, rows: int) -> spec.Spec:
    """The kernel for sums of 512 * splits elements and at most `rows` rows."""
    fp16 = dtype == torch.float16
    return spec.Spec.of("sm90/decode_linear", HOPPER.name, SPLITS=splits, MAX_T=rows, FP16=fp16, NORM=norm, ADD=add)
