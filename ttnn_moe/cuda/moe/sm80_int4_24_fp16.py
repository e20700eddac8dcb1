"""int4_24 experts of many rows in fp16, on sm_80 and newer: sm80/int4_24_many.cu."""

from __future__ import annotations

from dataclasses import dataclass

from ...contract import Problem
from ..arch import Arch
from ..jit.load import Launch
from .int4_24_fp16 import SortedFp16
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
    """

    warps: int
    max_n: int
    slabs: int
    stages: int

    granule = 16
    read_once = False

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_memory(self) -> int:
        stage = self.slabs * (512 * self.warps + 128 * self.max_n)
        return self.stages * stage + (self.stages + 1) * 4 * self.max_n + _ITEMS


_TILES = (SparseManyTile(8, 144, 2, 3), SparseManyTile(8, 144, 2, 2))
"""The second one for the shared memory of compute capability 8.6."""


class Sm80Int4_24Fp16(SortedFp16[SparseManyTile]):
    """See the module's docstring."""

    name = "int4_24_fp16"
    kernels = "CUDA C++ kernels of int4_24 words, sparse products of fp16"
    rows_kernel = "sm80/int4_24_fp16_rows"
    least_rows = 24

    def channels(self, channels: int) -> int:
        return channels

    def kernel(self, tile: SparseManyTile) -> str:
        return "sm80/int4_24_many"

    def tile(self, problem: Problem, arch: Arch) -> SparseManyTile:
        return next(tile for tile in _TILES if tile.shared_memory <= arch.shared_memory)

    def tiles(self) -> tuple[SparseManyTile, ...]:
        return _TILES

    def bind_product(self, plan: SortedPlan[SparseManyTile], use: Use, device: int) -> Launch:
        problem = plan.problem
        rows = gate_up_rows(problem.gate_up_order, problem.I)
        return use.bind_resident(plan.arch, device, plan.tile.threads, problem.H, problem.I, *rows)


INT4_24_FP16 = Sm80Int4_24Fp16()
