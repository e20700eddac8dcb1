"""int4_24 experts on Hopper in fp16: sm90/int4_24_mlp.cu.

The tiles were found on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...contract import Problem
from ...sizes import ceil_div
from ..arch import Arch, Target
from .cuda_cpp import why_not_products
from .int4_24_fp16 import SortedFp16
from .sm90_sparse import SparseRing, SparseRingTile

BLOCK_CHANNELS = 128
"""Rows are stored in whole blocks of so many channels."""


@dataclass(frozen=True)
class Fp16Tile(SparseRingTile):
    """Sizes of int4_24_mlp.cu."""

    @property
    def granule(self) -> int:
        return 8

    @property
    def shared_memory(self) -> int:
        return self.ring(128) + (self.stages + 1) * self.max_n * 4 + 8


# pairs (T * K) over experts, at most -> tile
_TILES: tuple[tuple[float, Fp16Tile], ...] = (
    (4, Fp16Tile(8, 2, 8, 3, warps=16, read_once=True)),
    (10, Fp16Tile(16, 2, 8, 2, warps=16, read_once=True)),
    (18, Fp16Tile(24, 2, 8, 2, warps=16, read_once=True)),
    (40, Fp16Tile(48, 2, 6, 3, warps=12, read_once=True)),
    (72, Fp16Tile(80, 2, 4, 3)),
    (float("inf"), Fp16Tile(144, 2, 2, 4)),
)


class Sm90Int4_24Fp16(SortedFp16[Fp16Tile], SparseRing[Fp16Tile]):
    """See the module's docstring."""

    name = "int4_24_fp16_sm90"
    kernels = "CUDA C++ kernels of int4_24 words, copies by the copy engine, sparse warpgroup products of fp16"
    rows_kernel = "sm90/int4_24_rows"
    least_rows = 2  # sm90/int4_24_quads_mlp.cu is as fast

    def channels(self, channels: int) -> int:
        return ceil_div(channels, BLOCK_CHANNELS) * BLOCK_CHANNELS

    def why_not(self, problem: Problem, target: Target) -> str | None:
        return super().why_not(problem, target) or why_not_products(target, "sm90")

    def kernel(self, tile: Fp16Tile) -> str:
        return "sm90/int4_24_mlp"

    def tile(self, problem: Problem, arch: Arch) -> Fp16Tile:
        rows = problem.T * problem.K / problem.E
        return next(tile for most, tile in _TILES if rows <= most)

    def tiles(self) -> tuple[Fp16Tile, ...]:
        return tuple(tile for _, tile in _TILES)


INT4_24_FP16_SM90 = Sm90Int4_24Fp16()
