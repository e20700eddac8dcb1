"""int4_24 experts on sm_80 and newer: both products in one launch of sm80/int4_24_mlp.cu.

The tiles were found on an H200. Nobody has timed them on another GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...contract import Problem
from ..arch import Arch
from ..jit.load import Launch
from .int4_24_sorted import SortedInt4_24
from .pairs import rows_an_expert
from .sorted import SortedPlan
from .uses import Use, gate_up_rows

ITEMS = 16 * 32 + 32  # bytes of claimed items, and of what they have in common


@dataclass(frozen=True)
class SparseTile:
    """Sizes of int4_24_mlp.cu.

    Attributes:
        warps_m, warps_n, warps_k: warps along the weight rows, 64 each, along the rows of a tile, and along channels.
        max_n, slabs, stages: rows of a tile at most, slabs of 64 channels in a stage, stages of the pipeline.
        blocks: resident blocks a multiprocessor, at least.
        read_once: L2 evicts weights first, and drops each expert output that combine has read.
    """

    warps_m: int
    warps_n: int
    warps_k: int
    max_n: int
    slabs: int
    stages: int
    blocks: int = 1
    read_once: bool = False

    @property
    def granule(self) -> int:
        return 8 * self.warps_n

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n * self.warps_k

    @property
    def shared_memory(self) -> int:
        stage = self.slabs * (1024 * self.warps_m + 128 * self.max_n)
        sums = (self.warps_k - 1) * self.warps_m * self.max_n * 256
        return self.stages * stage + sums + ITEMS


# multiply-adds of one projection, at most
_FEW_PRODUCTS = 5e8
_FEW = SparseTile(1, 1, 4, 8, 4, 4, blocks=4, read_once=True)
# rows an expert gets on average, at most -> tile
_TILES: tuple[tuple[float, SparseTile], ...] = (
    (5, SparseTile(2, 1, 2, 8, 4, 4, blocks=3, read_once=True)),
    (12, SparseTile(2, 1, 2, 16, 4, 4, blocks=3, read_once=True)),
    (24, SparseTile(2, 1, 2, 32, 2, 4, blocks=3, read_once=True)),
    (40, SparseTile(2, 1, 2, 48, 2, 4, blocks=2, read_once=True)),
    (80, SparseTile(2, 1, 2, 64, 2, 3, blocks=2, read_once=True)),
    (float("inf"), SparseTile(2, 2, 1, 128, 1, 4, blocks=2)),
)


class Sm80Int4_24(SortedInt4_24[SparseTile]):
    """See the module's docstring."""

    name = "int4_24"
    kernels = "CUDA C++ kernels of int4_24 words"

    def kernel(self, tile: SparseTile) -> str:
        return "sm80/int4_24_mlp"

    def tile(self, problem: Problem, arch: Arch) -> SparseTile:
        if problem.T * problem.K // problem.D * problem.H * problem.I <= _FEW_PRODUCTS:
            return _FEW
        rows = rows_an_expert(problem)
        return next(tile for most, tile in _TILES if rows <= most)

    def tiles(self) -> tuple[SparseTile, ...]:
        return _FEW, *(tile for _, tile in _TILES)

    def bind_product(self, plan: SortedPlan[SparseTile], use: Use, device: int) -> Launch:
        problem = plan.problem
        rows = gate_up_rows(problem.gate_up_order, problem.I)
        return use.bind_resident(plan.arch, device, plan.tile.threads, problem.H, problem.I, *rows)


INT4_24 = Sm80Int4_24()
