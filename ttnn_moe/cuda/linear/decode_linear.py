"""Linear layers of a decode step of up to 160 rows on Hopper: gpu_kernels/cuda/sm90/decode_linear.cu."""

from __future__ import annotations

from ctypes import c_float, c_int32
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ...sizes import ceil_div
from .. import device as devices
from .. import maps
from ..arch import HOPPER, why_not_hopper, why_not_words
from ..jit import load, pool, spec
from ..norm import rms_norm

NAME = "CUDA C++ decode_linear (sm_90a)"
MAX_ROWS = 160
"""Rows up to which a step with the kernel is faster than one with cuBLAS. It takes 192."""

MAX_NORMED = 64
"""Rows up to which the kernel normalises as fast as a launch before it."""

MAX_OUTSIDE = 64
"""Rows up to which a block has room of its own for the sums that others send."""

TILE, STEP, MOST_SPLITS = 64, 64, 8
THREADS = 160


@dataclass(frozen=True)
class Plan:
    """How a call is cut.

    Attributes:
        rows: of x that a block has room for. splits: blocks of a cluster, which share K. stages: of 64 elements of K.
    """

    rows: int
    splits: int
    stages: int

    @property
    def stage(self) -> int:
        """Bytes of a stage."""
        return 128 * (TILE + self.rows)

    @property
    def sums(self) -> int:
        """Bytes of a block's sums, or of the parts that others send it."""
        return 4 * TILE * (self.rows + 4)

    @property
    def least_stages(self) -> int:
        """Stages in whose place the sums fit, and with more than MAX_OUTSIDE rows the parts of others."""
        return max(2, ceil_div((2 if self.rows > MAX_OUTSIDE else 1) * self.sums, self.stage))

    def shared_memory(self, K: int, norm: bool) -> int:
        """Bytes of a block: alignment to 1024 bytes, stages, parts, barriers; squares, norm."""
        stages, parts = self.stages * self.stage, 0 if self.rows > MAX_OUTSIDE else self.sums
        own = 4 * self.rows * (self.splits + 1) + 2 * K // self.splits if norm else 0
        return 1024 + stages + parts + 24 * self.stages + 16 + own


@lru_cache(maxsize=1024)
def plan(T: int, N: int, K: int, multiprocessors: int) -> Plan | None:
    """The cut of a call. None: K has no such cut, or blocks come in waves.

    Up to 64 rows, blocks are small and hold most of the weight before x is there: three or four of them are resident,
    and the kernels before and after have room beside them. More rows want few blocks, since each block reads x.
    """
    rows = 8 if T <= 8 else 16 * ceil_div(T, 16)
    least, kib = (1.3, 74) if rows <= 64 else (0.9, 108)
    tiles, splits = N // TILE, 2
    while splits < MOST_SPLITS and tiles * splits < least * multiprocessors and K % (4 * splits * STEP) == 0:
        splits *= 2
    blocks = tiles * splits
    if K % (splits * STEP) or blocks > 3 * multiprocessors:
        return None
    if rows == 8 and blocks > 2 * multiprocessors:
        kib = 48
    of = Plan(rows, splits, 2)
    of = replace(of, stages=of.least_stages)
    while (
        of.stages < K // (splits * STEP)
        and (more := replace(of, stages=of.stages + 1)).shared_memory(K, False) <= kib << 10
    ):
        of = more
    return of


def why_not(device: torch.device, x: Tensor, weight: Tensor, bias: Tensor | None, other: Tensor) -> str | None:
    """For x [T, K], weight [N, K], and a norm [K], a residual [T, N] or x again."""
    T = x.shape[0]
    N, K = weight.shape
    if not 0 < T <= MAX_ROWS:
        return f"not 1 to {MAX_ROWS} rows"
    if bias is not None:
        return "it adds no bias"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return "neither bf16 nor fp16"
    if K % (2 * STEP) or N % TILE:
        return "the input size is no multiple of 128, or the output size none of 64"
    reason = why_not_hopper(device)
    if reason is not None:
        return reason
    if plan(T, N, K, devices.gpu(device).multiprocessors) is None:
        return "more than one wave of blocks: cuBLAS is faster"
    return why_not_words(x.dtype, x, weight, other)


def launch(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    of: Plan | None = None,
) -> Tensor:
    """rms_norm(x) weight^T, or x weight^T + residual [T, N], which the result overwrites. of: default: `plan`."""
    if norm is not None and x.shape[0] > MAX_NORMED:
        x, norm = rms_norm.launch(x, norm, eps), None
    (T, K), N, device = x.shape, weight.shape[0], x.device
    of = of or plan(T, N, K, devices.gpu(device).multiprocessors)
    assert of is not None, "why_not says so before"
    out = x.new_empty(T, N) if residual is None else residual
    with torch.cuda.device(device):
        _launch(x.dtype, T, N, K, norm is not None, residual is not None, eps, of, device.index)(
            load.stream(device.index),
            maps.linear_map(weight),
            maps.rows_map(x, of.rows),
            load.pointer(norm),
            load.pointer(residual),
            out.data_ptr(),
        )
    return out


@lru_cache(maxsize=1024)
def _launch(
    dtype: torch.dtype, T: int, N: int, K: int, norm: bool, add: bool, eps: float, of: Plan, device: int
) -> load.Launch:
    return load.Launch(
        spec_of(of, dtype, norm, add),
        device,
        (N // TILE * of.splits,),
        THREADS,
        c_float(eps),
        c_int32(T),
        c_int32(N),
        c_int32(K),
        shared_memory=of.shared_memory(K, norm),
        cluster=of.splits,
        overlap=True,
    )


def spec_of(of: Plan, dtype: torch.dtype, norm: bool, add: bool) -> spec.Spec:
    """The kernel of a cut."""
    return spec.Spec.of(
        "sm90/decode_linear",
        HOPPER.name,
        SPLITS=of.splits,
        ROWS=of.rows,
        STAGES=of.stages,
        NORM=norm,
        ADD=add,
        FP16=dtype == torch.float16,
    )


def compile_ahead(weight: Tensor, *, norm: bool = False, add: bool = False) -> None:
    """Compile the kernels of 1 to MAX_ROWS rows that the store lacks, several at a time. Nothing where none serves."""
    (N, K), device = weight.shape, weight.device
    if why_not(device, weight.new_empty(1, K), weight, None, weight) is not None:
        return
    plans = {plan(T, N, K, devices.gpu(device).multiprocessors) for T in range(1, MAX_ROWS + 1)}
    specs = [spec_of(of, weight.dtype, norm and of.rows <= MAX_NORMED, add) for of in plans if of is not None]
    pool.compile_missing(specs)
