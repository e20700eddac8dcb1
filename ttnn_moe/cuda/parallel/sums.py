"""Sums and gathers of ranks, by gpu_kernels/cuda/parallel.

Parts of few rows travel once, to all ranks. Those of many rows go to the rank that sums them, and its sums to all.
Every rank makes the same calls in the same order. A CUDA graph may hold them.
"""

from __future__ import annotations

from ctypes import c_int32
from functools import lru_cache

import torch
from torch import Tensor

from ...sizes import ceil_div
from .. import device as devices
from ..arch import Arch, asked, find
from ..jit import load
from ..jit.spec import Spec
from .heap import TILES, Heap

EACH, WIDEST = 4, 512
RESIDENT = 256
"""Blocks of WIDEST threads that a GPU runs at one time: a block that waits must not keep one from sending."""
TILE = 4
"""The fewest rows that share a flag."""


def why_not(heap: Heap, part: Tensor) -> str | None:
    """For part [T, n] of each rank."""
    T, n = part.shape
    if part.dtype not in (torch.bfloat16, torch.float16):
        return "neither bf16 nor fp16"
    if n % 4:
        return "rows of no multiple of four elements"
    if T * n // 4 > heap.capacity or T > RESIDENT:
        return f"more than {RESIDENT} rows, or than the heap's {heap.capacity * 4} elements"
    return None if part.is_contiguous() and part.data_ptr() % 8 == 0 else "not contiguous, or not aligned to 8 bytes"


def add(heap: Heap, part: Tensor, x: Tensor) -> Tensor:
    """x [T, H] += the sum of every rank's part [T, H]; the same bits on every rank. Returns x."""
    T, H = part.shape
    if T:
        device = part.device.index
        _launch(heap, _add(part.dtype, T, H, heap.ranks, heap.rank, heap.capacity, device), part, x)
    return x


def why_not_many(heap: Heap, part: Tensor) -> str | None:
    """For part [T, H] of each rank."""
    T, H = part.shape
    if part.dtype not in (torch.bfloat16, torch.float16):
        return "neither bf16 nor fp16"
    if H % 8 or T * H // 8 > heap.room or T > tile_of(T) * TILES:
        return f"rows of no multiple of eight elements, or more than the heap's {heap.room * 8} elements"
    return None if part.is_contiguous() and part.data_ptr() % 16 == 0 else "not contiguous, or not aligned to 16 bytes"


def add_many(heap: Heap, part: Tensor, x: Tensor) -> Tensor:
    """As add, of many rows: each rank sums its own columns, and sends the sums to the others."""
    T, H = part.shape
    if T:
        device = part.device.index
        _launch(heap, _add_many(part.dtype, T, H, heap.ranks, heap.rank, heap.capacity, heap.room, device), part, x)
    return x


def tile_of(T: int) -> int:
    """Rows that share a flag. All ranks choose the same."""
    return TILE if T <= 2048 else 2 * TILE


def gather(heap: Heap, part: Tensor, out: Tensor) -> Tensor:
    """out [T, R n]: part [T, n] of every rank, in ascending rank. Returns out."""
    T, n = part.shape
    if T:
        device = part.device.index
        _launch(heap, _gather(part.dtype, T, n, heap.ranks, heap.rank, heap.capacity, device), part, out)
    return out


def _launch(heap: Heap, kernel: load.Launch, part: Tensor, out: Tensor) -> None:
    if not heap.alone:
        kernel(load.stream(part.device.index), part.data_ptr(), out.data_ptr(), heap.address)


def rows_of(heap: Heap, n: int) -> int:
    """Rows of n elements that one gather takes."""
    return max(1, min(heap.capacity, RESIDENT * WIDEST * EACH) * 4 // n)


def threads_of(H: int) -> int:
    """Threads of a block that adds a row: four elements each, where so many fit."""
    return min(WIDEST, ceil_div(H, 128) * 32)


def add_spec(arch: str, dtype: torch.dtype, H: int, ranks: int) -> Spec:
    """add_parts for rows of H elements (bf16 or fp16) and so many ranks."""
    sizes = {"SIZE": H, "THREADS": threads_of(H), "RANKS": ranks}
    return Spec.of("parallel/add_parts", arch, FP16=dtype is torch.float16, **sizes)


def add_many_spec(arch: str, dtype: torch.dtype, H: int, ranks: int) -> Spec:
    """add_many for rows of H elements (bf16 or fp16) and so many ranks."""
    sizes = {"SIZE": H, "THREADS": WIDEST, "RANKS": ranks}
    return Spec.of("parallel/add_many", arch, FP16=dtype is torch.float16, **sizes)


def gather_spec(arch: str, dtype: torch.dtype, ranks: int) -> Spec:
    """gather_parts for so many ranks."""
    return Spec.of("parallel/gather_parts", arch, THREADS=WIDEST, EACH=EACH, RANKS=ranks, FP16=dtype is torch.float16)


@lru_cache(maxsize=1024)
def _add(dtype: torch.dtype, T: int, H: int, ranks: int, rank: int, capacity: int, device: int) -> load.Launch:
    arch = _arch(device)
    spec = add_spec(arch.name, dtype, H, ranks)
    return load.Launch(spec, device, (T,), threads_of(H), c_int32(rank), c_int32(capacity), overlap=arch.overlaps)


@lru_cache(maxsize=1024)
def _add_many(
    dtype: torch.dtype, T: int, H: int, ranks: int, rank: int, capacity: int, room: int, device: int
) -> load.Launch:
    arch = _arch(device)
    tile = tile_of(T)
    blocks = min(ceil_div(T, tile), 2 * devices.gpu(device).multiprocessors)
    last = c_int32(rank), c_int32(capacity), c_int32(T), c_int32(room), c_int32(tile)
    spec = add_many_spec(arch.name, dtype, H, ranks)
    return load.Launch(spec, device, (blocks,), WIDEST, *last, overlap=arch.overlaps)


@lru_cache(maxsize=1024)
def _gather(dtype: torch.dtype, T: int, n: int, ranks: int, rank: int, capacity: int, device: int) -> load.Launch:
    arch = _arch(device)
    return load.Launch(
        gather_spec(arch.name, dtype, ranks),
        device,
        (ceil_div(T * n // 4, WIDEST * EACH),),
        WIDEST,
        c_int32(T),
        c_int32(n),
        c_int32(rank),
        c_int32(capacity),
        overlap=arch.overlaps,
    )


def _arch(device: int) -> Arch:
    found = find(devices.gpu(device), asked())
    assert found is not None  # why_not_kernels refused older GPUs
    return found
