"""int4_24 experts in fp16, on sm_80 and newer: sm80/int4_24_many.cu.

The tiles were found on H100s that ran sm_80 code. Nobody has timed them on another GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...contract import Problem
from ..arch import Arch
from ..jit.load import Launch
from .int4_24_fp16 import SortedFp16
from .pairs import rows_an_expert
from .sorted import SortedPlan
from .uses import Use, gate_up_rows

_ITEMS = 16 * 32 + 48
"""Bytes of claimed items, and of what they have in common."""


@dataclass(frozen=True)
class SparseManyTile:
    """Sizes of int4_24_many.cu.

    Attributes:
        warps: of a block, 32 weight rows each; an even number. max_n: rows of a tile at most.
        slabs, stages: slabs of 64 channels in a stage, stages of the pipeline.
        blocks: resident blocks a multiprocessor, at least.
    """

    warps: int
    max_n: int
    slabs: int
    stages: int
    blocks: int = 1

    read_once = False

    @property
    def granule(self) -> int:
        return 8 if self.max_n <= 64 else 16

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_memory(self) -> int:
        stage = self.slabs * (512 * self.warps + 128 * self.max_n)
        return self.stages * stage + (self.stages + 1) * 4 * self.max_n + _ITEMS


# rows an expert gets on average, at most -> tile; the first that fits
_TILES: tuple[tuple[float, SparseManyTile], ...] = (
    (10, SparseManyTile(8, 16, 4, 3, blocks=2)),
    (10, SparseManyTile(8, 16, 2, 3, blocks=2)),  # with 99 KiB of shared memory
    (26, SparseManyTile(8, 32, 2, 3, blocks=2)),
    (26, SparseManyTile(8, 32, 2, 2, blocks=2)),  # with 99 KiB
    (44, SparseManyTile(8, 48, 2, 3, blocks=2)),
    (44, SparseManyTile(8, 48, 2, 2, blocks=2)),  # with 99 KiB
    (72, SparseManyTile(12, 80, 2, 3)),
    (float("inf"), SparseManyTile(8, 144, 2, 3)),
    (float("inf"), SparseManyTile(8, 144, 2, 2)),  # with 99 KiB
)


class Sm80Int4_24Fp16(SortedFp16[SparseManyTile]):
    """See the module's docstring."""

    name = "int4_24_fp16"
    kernels = "CUDA C++ kernels of int4_24 words, sparse products of fp16"
    rows_kernel = "sm80/int4_24_fp16_rows"
    least_rows = 3

    def channels(self, channels: int) -> int:
        return channels

    def kernel(self, tile: SparseManyTile) -> str:
        return "sm80/int4_24_many"

    def tile(self, problem: Problem, arch: Arch) -> SparseManyTile:
        rows = rows_an_expert(problem)
        return next(tile for most, tile in _TILES if rows <= most and arch.holds(tile.blocks, tile.shared_memory))

    def tiles(self) -> tuple[SparseManyTile, ...]:
        return tuple(tile for _, tile in _TILES)

    def bind_product(self, plan: SortedPlan[SparseManyTile], use: Use, device: int) -> Launch:
        problem = plan.problem
        rows = gate_up_rows(problem.gate_up_order, problem.I)
        return use.bind_resident(plan.arch, device, plan.tile.threads, problem.H, problem.I, *rows)


INT4_24_FP16 = Sm80Int4_24Fp16()
