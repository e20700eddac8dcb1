"""Which CUDA C++ kernels run a problem, and with which sizes: a pure function of what the host knows.

Hopper's numbers were found on an H200; those of other GPUs are checked to fit.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...sizes import power_of_2
from ..arch import HOPPER, Arch
from ..tiles import is_few
from . import sm80_tiles
from .sm80_tiles import MmaGemm

MAX_E, MAX_K = 1024, 16
# of Qwen3-30B-A3B's sizes: T = 3
FEW_PAIRS = 24
BARRIERS_AND_ALIGNMENT = 1024 + 16 * 12 + 16 * 4 + 32 * 4


@dataclass(frozen=True)
class Few:
    """Few tokens, no sort: see few_gate_up.cu and few_down.cu."""

    warps: int = 4
    channels: int = 1
    unroll: int = 4
    columns: int = 8
    prefetch: int = 3
    arch: Arch = HOPPER


@dataclass(frozen=True)
class Gemm:
    """sm90/grouped_mlp.cu.

    Attributes:
        max_n, stages, weight_rows: rows of a tile at most, stages of the pipeline, weight rows of an item.
        read_once: L2 lets weights go first, since few experts have a second tile, and what combine has read; so
            that expert outputs need not go to memory.
    """

    max_n: int
    stages: int
    weight_rows: int = 256
    read_once: bool = False

    @property
    def shared_memory(self) -> int:
        pieces = 64 * self.weight_rows
        return self.stages * (self.weight_rows + self.max_n) * 128 + pieces + BARRIERS_AND_ALIGNMENT

    @property
    def defines(self) -> dict[str, int]:
        return {
            "MAX_N": self.max_n,
            "STAGES": self.stages,
            "WEIGHT_ROWS": self.weight_rows,
            "READ_ONCE": self.read_once,
        }


@dataclass(frozen=True)
class Sorted:
    """Sort, both grouped products, combine.

    Attributes:
        sort_threads, sort_cluster: threads of a block that sorts, and blocks.
    """

    gemm: Gemm | MmaGemm
    sort_threads: int = 1024
    sort_cluster: int = 1
    arch: Arch = HOPPER


Plan = Few | Sorted

# rows an expert gets on average, at most -> sizes
_GEMMS: tuple[tuple[float, Gemm], ...] = (
    (12, Gemm(32, 10, 128, read_once=True)),
    (40, Gemm(64, 9, 128, read_once=True)),
    (72, Gemm(80, 7, 128, read_once=True)),
    (400, Gemm(160, 4)),
    (float("inf"), Gemm(176, 3)),
)


def why_not(T: int, E: int, K: int, H: int, I: int, itemsize: int, arch: Arch = HOPPER) -> str | None:
    """Why these kernels do not serve a problem, or None."""
    if itemsize != 2:
        return "they multiply bf16 and fp16"
    if H % 64 or I % 64:
        return f"H and I have to be multiples of 64, not {H} and {I}"
    if E > MAX_E or K > MAX_K:
        return f"they run up to {MAX_E} experts and K up to {MAX_K}, not E={E}, K={K}"
    if not _sort_fits(_least_sorters(E), E, arch):
        return f"sorting pairs of E={E} takes more shared memory than {arch.name} has: {arch.shared_memory >> 10} KiB"
    if T * max(H, K * I) >= 1 << 35:
        return f"they address up to 2^35 elements of hidden or activations, not those of T={T}"
    return None


def choose(T: int, E: int, K: int, arch: Arch = HOPPER) -> Plan:
    """Kernels of T tokens (or a bound on them), K of E experts each."""
    few = Few(arch=arch) if arch is HOPPER else Few(columns=4, arch=arch)  # more spill
    return few if T * K <= FEW_PAIRS and is_few(T, E, K) else many(T, E, K, arch)


def many(T: int, E: int, K: int, arch: Arch = HOPPER) -> Sorted:
    """The sorted form, for any T."""
    rows, pairs = T * K / min(E, T * K), T * K
    cluster = 8 if arch.products == "sm90" and pairs > 512 else 1
    threads = min(1024, max(_least_sorters(E), power_of_2(pairs) // max(2, cluster)))
    if arch.products == "sm90":
        gemm = next(gemm for most, gemm in _GEMMS if rows <= most)
        return Sorted(gemm, threads, cluster, arch)
    while not _sort_fits(threads, E, arch):
        threads //= 2
    return Sorted(sm80_tiles.choose(rows, arch.shared_memory), threads, arch=arch)


def sort_memory(threads: int, E: int) -> int:
    """Bytes of dynamic shared memory of a block of routing_sort.cu."""
    return 256 + (threads // 32 + 2) * E * 4


def _sort_fits(threads: int, E: int, arch: Arch) -> bool:
    return sort_memory(threads, E) <= arch.shared_memory


def _least_sorters(E: int) -> int:
    return max(power_of_2(E), 128)
