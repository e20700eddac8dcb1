"""Which CUDA C++ kernels run a problem, and with which sizes: a pure function of what the host knows.

Numbers were found on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..tiles import is_few

MAX_E, MAX_K = 1024, 16
# of Qwen3-30B-A3B's sizes: T = 3
FEW_PAIRS = 24
SHARED_MEMORY = 227 << 10
BARRIERS_AND_ALIGNMENT = 1024 + 16 * 12 + 96


@dataclass(frozen=True)
class Few:
    """Few tokens, no sort: see few_gate_up.cu and few_down.cu."""

    warps: int = 4
    channels: int = 1
    unroll: int = 4
    columns: int = 8
    prefetch: int = 3


@dataclass(frozen=True)
class Gemm:
    """grouped_mlp.cu: rows of a tile at most, stages of the pipeline, weight rows of an item."""

    max_n: int
    stages: int
    weight_rows: int = 256

    @property
    def shared_memory(self) -> int:
        pieces = 64 * self.weight_rows
        return self.stages * (self.weight_rows + self.max_n) * 128 + pieces + BARRIERS_AND_ALIGNMENT


@dataclass(frozen=True)
class Sorted:
    """Sort, both grouped products, combine.

    Attributes:
        sort_threads, sort_cluster: threads of a block that sorts, and blocks.
    """

    gemm: Gemm
    sort_threads: int = 1024
    sort_cluster: int = 1


Plan = Few | Sorted

# rows an expert gets on average, at most -> sizes
_GEMMS: tuple[tuple[float, Gemm], ...] = (
    (12, Gemm(32, 10, 128)),
    (40, Gemm(64, 9, 128)),
    (72, Gemm(80, 7, 128)),
    (400, Gemm(160, 4)),
    (float("inf"), Gemm(176, 3)),
)


def why_not(T: int, E: int, K: int, H: int, I: int, itemsize: int, capability: tuple[int, int]) -> str | None:
    """Why these kernels do not serve a problem, or None."""
    if capability[0] != 9:
        return f"they are for compute capability 9.0, not {capability[0]}.{capability[1]}"
    if itemsize != 2:
        return "they multiply bf16 and fp16"
    if H % 64 or I % 64:
        return f"H and I have to be multiples of 64, not {H} and {I}"
    if E > MAX_E or K > MAX_K:
        return f"they run up to {MAX_E} experts and K up to {MAX_K}, not E={E}, K={K}"
    if T * max(H, K * I) >= 1 << 35:
        return f"they address up to 2^35 elements of hidden or activations, not those of T={T}"
    return None


def choose(T: int, E: int, K: int) -> Plan:
    """Kernels of T tokens (or a bound on them), K of E experts each."""
    return Few() if T * K <= FEW_PAIRS and is_few(T, E, K) else many(T, E, K)


def many(T: int, E: int, K: int) -> Sorted:
    """The sorted form, for any T."""
    rows, pairs = T * K / min(E, T * K), T * K
    gemm = next(gemm for most, gemm in _GEMMS if rows <= most)
    threads = min(1024, max(_power_of_2(E), _power_of_2(pairs) // 2, 128))
    return Sorted(gemm, threads, sort_cluster=1 if pairs <= 2048 else 8)


def _power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
