"""The floor of a draw: the time that its bytes or its floating-point operations take at the machine's measured best.

Bytes count at the read bandwidth, operations at the rate of a large matrix product. The same run measures both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from .draw import Draw
from .layer import Layer
from .timing import fastest_us_on_device


@dataclass(frozen=True)
class Ceilings:
    """Measured here, now: bytes a second of a streaming read, floating-point operations a second of a product."""

    read_bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Floor:
    """Microseconds: of the bytes, of the operations, and the larger of the two."""

    bytes_us: float
    flops_us: float

    @property
    def us(self) -> float:
        """The longer of both terms, in microseconds."""
        return max(self.bytes_us, self.flops_us)


def bytes_moved(layer: Layer, draw: Draw) -> int:
    """Weights of the experts that have tokens, each read once; hidden read once; the output written once."""
    return draw.active * layer.expert_bytes + 2 * len(draw.ids) * layer.H * layer.dtype.itemsize


def flops(layer: Layer, draw: Draw) -> int:
    """Multiplications and additions of the three products of every pair that names an expert."""
    return 6 * draw.pairs * layer.H * layer.I


def floor(layer: Layer, draw: Draw, ceilings: Ceilings) -> Floor:
    """The floor of one call; see Floor."""
    return Floor(
        bytes_moved(layer, draw) / ceilings.read_bytes_per_s * 1e6, flops(layer, draw) / ceilings.flops_per_s * 1e6
    )


def measure_ceilings(device: str, dtype: torch.dtype) -> Ceilings:
    """On CUDA, in graphs: a read of 4 GiB (by a Triton kernel or a torch reduction), and an 8192^3 product of random
    matrices. On the CPU: a reduction of 256 MiB and a 1024^3 product, in this dtype and in fp32. Each: the fastest of
    several."""
    if device == "cuda":
        return Ceilings(_read_cuda(2**32), _product(device, dtype, 8192))
    return Ceilings(_read_cpu(2**28), _product(device, dtype, 1024))


def _read_cuda(size: int) -> float:
    from .read import streaming_sum

    data = torch.randint(-(2**31), 2**31 - 1, (size // 4,), dtype=torch.int32, device="cuda")
    partial = streaming_sum(data)
    # 32-bit sums wrap around alike: every element was read, once
    if int(partial.long().sum()) % 2**32 != int(data.sum()) % 2**32:
        raise AssertionError("the read kernel did not read what it was given")
    rows = data.view(torch.float32).view(4096, -1)
    times = [fastest_us_on_device(lambda: streaming_sum(data)), fastest_us_on_device(lambda: rows.sum(1))]
    return size / min(times) * 1e6


def _read_cpu(size: int) -> float:
    data = torch.ones(size // 4)
    return size / _fastest_seconds(data.sum)


def _product(device: str, dtype: torch.dtype, n: int) -> float:
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    if device == "cuda":
        out = torch.empty_like(a)
        us = fastest_us_on_device(lambda: torch.matmul(a, b, out=out))
        return 2 * n**3 / us * 1e6
    # which of these is fast depends on the CPU: in bf16, a @ b takes ten times as long as a @ b.T on some
    pairs = [(a, b), (a, b.T)]
    if dtype != torch.float32:
        pairs.append((a.float(), b.float()))
    return 2 * n**3 / min(_fastest_seconds(partial(torch.matmul, x, y)) for x, y in pairs)


def _fastest_seconds(call: Callable[[], object]) -> float:
    """Of ten calls, or of fewer where they take long (fp16 products on most CPUs do)."""
    times: list[float] = []
    while len(times) < 10 and sum(times) < 0.5:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
