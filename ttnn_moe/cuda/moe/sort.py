"""The CUDA C++ kernels before and after grouped products: common/routing_{count,sort}.cu and common/combine.cu."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...contract import Problem
from ...sizes import ceil_div, power_of_2
from ..arch import Arch
from ..jit.load import Launch
from .pairs import tiles_bound
from .uses import Use

MOST_PARTS = 64


@dataclass(frozen=True)
class Sorters:
    """Threads of a block that sorts; blocks: one cluster, or parts that a launch before counts."""

    threads: int = 1024
    cluster: int = 1
    parts: int = 1

    def shared_memory(self, E: int) -> int:
        """Bytes of dynamic shared memory of a block."""
        return 256 + (self.threads // 32 + 2) * E * 4


def choose(problem: Problem, arch: Arch) -> Sorters:
    """The sort of a problem's pairs."""
    pairs = problem.T * problem.K
    cluster = 8 if arch.products == "sm90" and pairs > 512 else 1
    # without clusters: one block takes 10 us for 4,096 pairs, 216 us for 131,072 (an H100)
    parts = min(ceil_div(pairs, 1024), MOST_PARTS) if arch.products != "sm90" and pairs > 2048 else 1
    threads = min(1024, max(_least_threads(problem.E), power_of_2(pairs) // (cluster * parts)))
    return Sorters(threads, cluster, parts)


def why_not(E: int, arch: Arch) -> str | None:
    """Why no block can sort pairs of E experts, or None."""
    if Sorters(_least_threads(E)).shared_memory(E) <= arch.shared_memory:
        return None
    return f"sorting pairs of E={E} takes more shared memory than {arch.name} has: {arch.shared_memory >> 10} KiB"


def _least_threads(E: int) -> int:
    return max(power_of_2(E), 128)


@dataclass(frozen=True)
class Words:
    """What the sort writes, as byte offsets into one int32 buffer.

    row_tokens [P] stands at 0; inverse [P]; tiles [tiles_bound, 4]; num_tiles [4]; counts [parts, E].
    """

    inverse: int
    tiles: int
    num_tiles: int
    counts: int
    count: int  # int32 words of the buffer

    @classmethod
    def of(cls, P: int, E: int, m: int, parts: int = 1) -> Words:
        """The offsets for P pairs to E experts in tiles of up to m rows."""
        rows = 16 * ceil_div(P, 4)
        num_tiles = 2 * rows + 16 * tiles_bound(P, E, m)
        counts = num_tiles + 16
        return cls(rows, 2 * rows, num_tiles, counts, counts // 4 + (parts * E if parts > 1 else 0))


def sort_uses(arch: Arch, sorters: Sorters, E: int, ids64: bool, granule: int, beside: bool = False) -> tuple[Use, ...]:
    """The kernels of the sort, in the order of their launch.

    Args:
        granule: rows of a tile, but the last, are a multiple.
        beside: the sort runs beside its predecessor, a kernel of the same call that writes nothing that the sort reads.
    """
    parted, threads = sorters.parts > 1, {"ID64": ids64, "THREADS": sorters.threads}
    sizes = {"CLUSTER": sorters.cluster, "PARTED": parted}
    if beside and not parted:
        sizes["WAIT_LATE"] = 1
    use = Use.of(arch, "common/routing_sort", sorters.shared_memory(E), **threads, **sizes, GRANULE=granule)
    return (Use.of(arch, "common/routing_count", 4 * E, **threads), use) if parted else (use,)


def bind_sorts(
    uses: tuple[Use, ...], sorters: Sorters, device: int, P: int, E_ids: int, E: int, K: int, m: int
) -> tuple[Launch, ...]:
    """Sort P pairs of ids below E_ids by local expert, E of them, in tiles of up to m rows."""
    *counts, use = uses
    grid, sizes = (sorters.cluster * sorters.parts,), (P, E_ids, E, K)
    return (
        *(count.bind(device, grid, sorters.threads, *sizes) for count in counts),
        use.bind(device, grid, sorters.threads, *sizes, m, cluster=sorters.cluster),
    )


def launch_sorts(launches: Sequence[Launch], stream: Any, route: tuple[int, int, int], at: int, words: Words) -> None:
    """Sort. route: addresses of ids, expert_map, num_tokens. at: address of the buffer of words."""
    *counts, sort = launches
    for count in counts:
        count(stream, *route, at + words.counts)
    out = at, at + words.inverse, at + words.tiles, at + words.num_tiles
    sort(stream, *route, *out, at + words.counts if counts else 0)


def bind_combine(use: Use, device: int, T: int, H: int) -> Launch:
    """A launch of the combine for T rows of H."""
    threads = min(256, ceil_div(H, 256) * 32)
    return use.bind(device, (T, ceil_div(H, 8 * threads)), threads, H)
