"""The CUDA C++ kernels before and after grouped products: common/routing_sort.cu and common/combine.cu."""

from __future__ import annotations

from dataclasses import dataclass

from ...contract import Problem
from ...sizes import ceil_div, power_of_2
from ..arch import Arch
from ..jit.load import Launch
from .pairs import tiles_bound
from .uses import Use


@dataclass(frozen=True)
class Sorters:
    """Threads of a block that sorts, and blocks, which are one cluster."""

    threads: int = 1024
    cluster: int = 1

    def shared_memory(self, E: int) -> int:
        """Bytes of dynamic shared memory of a block."""
        return 256 + (self.threads // 32 + 2) * E * 4


def choose(problem: Problem, arch: Arch) -> Sorters:
    """The sort of a problem's pairs."""
    pairs = problem.T * problem.K
    cluster = 8 if arch.products == "sm90" and pairs > 512 else 1
    threads = min(1024, max(_least_threads(problem.E), power_of_2(pairs) // max(2, cluster)))
    while not _fits(Sorters(threads), problem.E, arch):
        threads //= 2
    return Sorters(threads, cluster)


def why_not(E: int, arch: Arch) -> str | None:
    """Why no block can sort pairs of E experts, or None."""
    if _fits(Sorters(_least_threads(E)), E, arch):
        return None
    return f"sorting pairs of E={E} takes more shared memory than {arch.name} has: {arch.shared_memory >> 10} KiB"


def _fits(sorters: Sorters, E: int, arch: Arch) -> bool:
    return sorters.shared_memory(E) <= arch.shared_memory


def _least_threads(E: int) -> int:
    return max(power_of_2(E), 128)


@dataclass(frozen=True)
class Words:
    """What the sort writes, as byte offsets into one int32 buffer.

    row_tokens [P] stands at 0; inverse [P]; tiles [tiles_bound, 4]; num_tiles [4].
    """

    inverse: int
    tiles: int
    num_tiles: int

    @classmethod
    def of(cls, P: int, E: int, m: int) -> Words:
        """The offsets for P pairs to E experts in tiles of up to m rows."""
        rows = 16 * ceil_div(P, 4)
        return cls(rows, 2 * rows, 2 * rows + 16 * tiles_bound(P, E, m))

    @property
    def count(self) -> int:
        """int32 words of the buffer."""
        return self.num_tiles // 4 + 4


def sort_use(arch: Arch, sorters: Sorters, E: int, ids64: bool) -> Use:
    sizes = {"ID64": ids64, "CLUSTER": sorters.cluster, "THREADS": sorters.threads}
    return Use.of(arch, "common/routing_sort", sorters.shared_memory(E), **sizes)


def bind_sort(use: Use, sorters: Sorters, device: int, P: int, E_ids: int, E: int, K: int, m: int) -> Launch:
    """Sort P pairs of ids below E_ids by local expert, E of them, in tiles of up to m rows."""
    return use.bind(device, (sorters.cluster,), sorters.threads, P, E_ids, E, K, m, cluster=sorters.cluster)


def bind_combine(use: Use, device: int, T: int, H: int) -> Launch:
    threads = min(256, ceil_div(H, 256) * 32)
    return use.bind(device, (T, ceil_div(H, 8 * threads)), threads, H)
