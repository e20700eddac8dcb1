"""Linear layers of a decode step of several rows on Hopper: gpu_kernels/cuda/sm90/decode_linear.cu."""

from __future__ import annotations

from ctypes import c_float, c_int32
from functools import cache, lru_cache

import torch
from torch import Tensor

from ttnn_moe.cuda.device import gpu
from ttnn_moe.cuda.jit import build, load
from ttnn_moe.cuda.jit.spec import Spec
from ttnn_moe.sizes import power_of_2

MAX_ROWS = 32
SLICE, TILE = 512, 64


def rows_of(T: int) -> int:
    """Rows of the kernel for T: 8, 16 or 32."""
    return max(8, power_of_2(T))


def shared_memory(rows: int) -> int:
    """Bytes of a block: to begin at a multiple of 1024, weights, rows, their squares, barriers."""
    return 1024 + 8 * 64 * 128 + 8 * rows * 128 + 4 * rows + 8 * 8


def blocks(rows: int) -> int:
    """That fit on a multiprocessor at a time: with more in all, cuBLAS is faster. CUDA keeps 1 KiB of each."""
    return (228 << 10) // (shared_memory(rows) + 1024)


def serves(x: Tensor, weight: Tensor, other: Tensor) -> bool:
    """Whether x [T, K], weight [N, K] and a norm or residual are on a GPU, of a dtype and of sizes that the kernel
    takes, and lie as it reads them."""
    N, K = weight.shape
    return (
        x.is_cuda
        and 0 < x.shape[0] <= MAX_ROWS
        and x.dtype in (torch.bfloat16, torch.float16)
        and K % SLICE == 0
        and K <= 8 * SLICE
        and N % TILE == 0
        and N // TILE * (K // SLICE) <= blocks(rows_of(x.shape[0])) * gpu(x.device).multiprocessors
        and all(t.dtype == x.dtype and t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (x, weight, other))
        and on_hopper(x.device.index)
    )


@cache
def on_hopper(device: int) -> bool:
    """Whether a GPU runs the kernels of gpu_kernels/cuda/sm90, and they can be compiled here."""
    return gpu(device).capability == (9, 0) and build.why_not() is None


def decode_linear(
    x: Tensor, weight: Tensor, *, norm: Tensor | None = None, eps: float = 0.0, residual: Tensor | None = None
) -> Tensor:
    """rms_norm(x) weight^T, or x weight^T + residual [T, N], which is then the output."""
    from ttnn_moe.cuda.maps import linear_map

    (T, K), N = x.shape, weight.shape[0]
    out = x.new_empty(T, N) if residual is None else residual
    with torch.cuda.device(x.device):
        _launch(x.dtype, K // SLICE, T, N, norm is not None, residual is not None, eps, x.device.index)(
            load.stream(x.device.index),
            linear_map(weight),
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


def spec_of(splits: int, dtype: torch.dtype, norm: bool, add: bool, rows: int) -> Spec:
    """The kernel for sums of 512 * splits elements, of so many rows at most."""
    fp16 = dtype == torch.float16
    return Spec.of("sm90/decode_linear", "sm_90a", SPLITS=splits, MAX_T=rows, FP16=fp16, NORM=norm, ADD=add)
