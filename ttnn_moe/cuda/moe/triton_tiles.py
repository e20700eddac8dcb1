"""Tiles of the Triton kernels: a pure function of the problem and the GPU.

benchmarks/tune_triton.py found the numbers on an H200. On other GPUs they fit, and nobody tuned them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ...contract import Problem
from ...sizes import power_of_2
from ..device import Gpu
from .pairs import rows_an_expert

# T = 4 of Qwen3-30B-A3B. With a sort, T = 2 takes as long on the GPU, but twice the launches on the host.
MOST_PAIRS = 32


@dataclass(frozen=True)
class TritonTile:
    """Tile of a grouped product: n columns and k of the sum a step, warps, pipeline stages."""

    n: int
    k: int
    warps: int
    stages: int

    @cached_property
    def options(self) -> dict[str, int]:
        """The tile as a kernel's launch takes it."""
        return {"BLOCK_N": self.n, "BLOCK_K": self.k, "num_warps": self.warps, "num_stages": self.stages}


@dataclass(frozen=True)
class FewTiles:
    """T*K pairs without a sort, in two launches; tiles of n rows of weights by k of the sum."""

    gate_up: TritonTile
    down: TritonTile


@dataclass(frozen=True)
class SortedTiles:
    """Sort, two grouped products in row tiles of m, combine: four launches, five where the sort has several chunks.

    Attributes:
        m: rows of a tile. gate_up, down: tiles of the products.
        sort_chunk: pairs that a program of the sort reads.
        combine_h: columns that a program of the combine sums.
    """

    m: int
    gate_up: TritonTile
    down: TritonTile
    sort_chunk: int = 4096
    combine_h: int = 256


# rows an expert gets on average, at most -> tiles of two-byte weights
_HOPPER: tuple[tuple[float, SortedTiles], ...] = (
    (8, SortedTiles(16, TritonTile(32, 128, 4, 4), TritonTile(128, 128, 4, 3))),
    (16, SortedTiles(32, TritonTile(64, 128, 4, 3), TritonTile(128, 128, 4, 3))),
    (48, SortedTiles(64, TritonTile(64, 64, 4, 3), TritonTile(128, 64, 4, 4))),
    (float("inf"), SortedTiles(128, TritonTile(128, 64, 8, 4), TritonTile(128, 64, 8, 3))),
)
# no wgmma, and shared memory from 99 KiB on
_OTHER: tuple[tuple[float, SortedTiles], ...] = (
    (8, SortedTiles(16, TritonTile(32, 64, 4, 4), TritonTile(64, 64, 4, 4))),
    (24, SortedTiles(32, TritonTile(64, 64, 4, 3), TritonTile(64, 64, 4, 4))),
    (96, SortedTiles(64, TritonTile(64, 64, 4, 3), TritonTile(128, 64, 4, 3))),
    (float("inf"), SortedTiles(128, TritonTile(64, 32, 8, 4), TritonTile(128, 32, 8, 4))),
)
# fp32 products run on the CUDA cores
_FP32 = SortedTiles(16, TritonTile(32, 32, 4, 2), TritonTile(32, 32, 4, 2))


def few_tiles(problem: Problem) -> FewTiles:
    """Tiles of few pairs."""
    return FewTiles(TritonTile(8, 256, 1, 1), TritonTile(2, min(1024, max(power_of_2(problem.I), 16)), 1, 1))


def sorted_tiles(problem: Problem, gpu: Gpu) -> SortedTiles:
    """Tiles of sorted rows. A device with 1 / D of the experts gets about 1 / D of the pairs, so D changes nothing."""
    if problem.dtype.itemsize == 4:
        return _FP32
    rows, table = rows_an_expert(problem), _HOPPER if gpu.capability[0] == 9 else _OTHER
    tiles = next(tiles for most, tiles in table if rows <= most)
    return replace(tiles, sort_chunk=2048 if problem.T * problem.K <= 1 << 15 else 8192)


def shared_memory(tiles: SortedTiles, itemsize: int) -> int:
    """Bytes of shared memory that the pipelines of the products hold at most."""
    m, up, down = tiles.m, tiles.gate_up, tiles.down
    return itemsize * max(up.stages * up.k * (m + 2 * up.n), down.stages * down.k * (m + down.n))
