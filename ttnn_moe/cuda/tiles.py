"""Which kernels run a problem and with which tiles: a pure function of sizes that the host knows.

The numbers were found by benchmarks/tune_triton.py on an H200; on other GPUs they are checked to fit, not tuned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..sizes import power_of_2

# of Qwen3-30B-A3B's sizes: T = 4. Sorted, T = 2 takes as long on the GPU, but twice the launches on the host.
FEW_PAIRS = 32


@dataclass(frozen=True)
class Gemm:
    """Tile of a grouped product: n columns and k of the sum a step, warps, pipeline stages."""

    n: int
    k: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Few:
    """T*K pairs without a sort, in two launches; tiles of n rows of weights by k of the sum."""

    gate_up: Gemm
    down: Gemm


@dataclass(frozen=True)
class Sorted:
    """Sort, two grouped products in row tiles of m, combine: four launches, five where the sort has several chunks.

    Attributes:
        m: rows of a tile. gate_up, down: tiles of the products.
        sort_chunk: pairs that a program of the sort reads.
        combine_h: columns that a program of the combine sums.
    """

    m: int
    gate_up: Gemm
    down: Gemm
    sort_chunk: int = 4096
    combine_h: int = 256


Plan = Few | Sorted

# rows an expert gets on average, at most -> tiles of two-byte weights
_HOPPER: tuple[tuple[float, Sorted], ...] = (
    (8, Sorted(16, Gemm(32, 128, 4, 4), Gemm(128, 128, 4, 3))),
    (16, Sorted(32, Gemm(64, 128, 4, 3), Gemm(128, 128, 4, 3))),
    (48, Sorted(64, Gemm(64, 64, 4, 3), Gemm(128, 64, 4, 4))),
    (float("inf"), Sorted(128, Gemm(128, 64, 8, 4), Gemm(128, 64, 8, 3))),
)
# no wgmma, and shared memory from 99 KiB on
_OTHER: tuple[tuple[float, Sorted], ...] = (
    (8, Sorted(16, Gemm(32, 64, 4, 4), Gemm(64, 64, 4, 4))),
    (24, Sorted(32, Gemm(64, 64, 4, 3), Gemm(64, 64, 4, 4))),
    (96, Sorted(64, Gemm(64, 64, 4, 3), Gemm(128, 64, 4, 3))),
    (float("inf"), Sorted(128, Gemm(64, 32, 8, 4), Gemm(128, 32, 8, 4))),
)
# fp32 products run on the CUDA cores
_FP32 = Sorted(16, Gemm(32, 32, 4, 2), Gemm(32, 32, 4, 2))


def is_few(T: int, E: int, K: int) -> bool:
    """Whether T tokens run without a sort: pairs are few, and of E experts seldom name the same."""
    return T * K <= FEW_PAIRS and (T == 1 or 3 * T * K <= E)


def choose(T: int, E: int, K: int, H: int, I: int, itemsize: int, capability: tuple[int, int]) -> Plan:
    """Kernels and tiles of T tokens (or a bound on them), K of E experts each.

    Args:
        E: experts that ids name; a device that holds some of them gets as many pairs less.
        itemsize: bytes of an element: 2, or 4 for fp32.
        capability: of the GPU, e.g. (9, 0).
    """
    if is_few(T, E, K):
        return Few(Gemm(8, 256, 1, 1), Gemm(2, min(1024, max(power_of_2(I), 16)), 1, 1))
    if itemsize == 4:
        return _FP32
    rows = T * K / min(E, T * K)
    plan = next(plan for most, plan in (_HOPPER if capability[0] == 9 else _OTHER) if rows <= most)
    return replace(plan, sort_chunk=2048 if T * K <= 1 << 15 else 8192)


def shared_memory(plan: Plan, itemsize: int) -> int:
    """Bytes of shared memory that the pipelines of a plan hold at most."""
    if isinstance(plan, Few):
        return 0
    m, up, down = plan.m, plan.gate_up, plan.down
    return itemsize * max(up.stages * up.k * (m + 2 * up.n), down.stages * down.k * (m + down.n))
