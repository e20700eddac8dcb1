"""int4_24 experts on Hopper, one or two rows each: sm90/int4_24_quads_mlp.cu. The tile was found on an H200."""

from __future__ import annotations

from dataclasses import dataclass

from ...contract import Problem
from ..arch import Arch, Target
from ..jit.load import Launch
from .int4_24_sorted import SortedInt4_24
from .sorted import SortedPlan
from .uses import Use

_ALIGNMENT, _SLOTS = 1024, 4


@dataclass(frozen=True)
class Sm90SparseTile:
    """Sizes of int4_24_quads_mlp.cu.

    Attributes:
        max_n: rows of a tile at most.
        m_tiles: products along the weight rows a warpgroup, 64 rows each.
        slabs, stages: slabs of 64 channels in a stage, stages of the ring.
        blocks: resident blocks a multiprocessor.
        warps: that multiply.
        read_once: L2 evicts weights first, and drops each expert output that combine has read.
    """

    max_n: int
    m_tiles: int
    slabs: int
    stages: int
    blocks: int = 1
    warps: int = 8
    read_once: bool = False

    @property
    def granule(self) -> int:
        return 2

    @property
    def weight_rows(self) -> int:
        return 16 * self.m_tiles * self.warps

    @property
    def threads(self) -> int:
        return 32 * (self.warps + 4)

    @property
    def shared_memory(self) -> int:
        words = self.slabs * (16 * self.weight_rows + 64)
        rows = self.slabs * 128 * self.max_n * 4
        return _ALIGNMENT + self.stages * (words + rows + 16) + _SLOTS * (16 + 32) + 16


_MOST_ROWS = 4
"""Of an expert on average: with more, the kernels of sm_80 are faster."""
_TILE = Sm90SparseTile(8, 2, 6, 3, warps=16, read_once=True)


class Sm90Int4_24(SortedInt4_24[Sm90SparseTile]):
    """See the module's docstring."""

    name = "int4_24_sm90"
    kernels = "CUDA C++ kernels of int4_24 words, copies by the copy engine, sparse warpgroup products"

    def why_not(self, problem: Problem, target: Target) -> str | None:
        reason = super().why_not(problem, target)
        if reason is None and target.arch is not None and target.arch.products != "sm90":
            reason = f"its code is for sm_90a, not {target.arch.name}"
        if reason is None and problem.T * problem.K > _MOST_ROWS * problem.E:
            reason = f"it runs up to {_MOST_ROWS} rows an expert, not {problem.T * problem.K} on {problem.E}"
        return reason

    def kernel(self, tile: Sm90SparseTile) -> str:
        return "sm90/int4_24_quads_mlp"

    def tile(self, problem: Problem, arch: Arch) -> Sm90SparseTile:
        return _TILE

    def tiles(self) -> tuple[Sm90SparseTile, ...]:
        return (_TILE,)

    def prepares(self, plan: SortedPlan[Sm90SparseTile]) -> bool:
        return False

    def product_defines(self, problem: Problem) -> dict[str, object]:
        return {"INTERLEAVED": problem.gate_up_order == "interleaved"}

    def bind_product(self, plan: SortedPlan[Sm90SparseTile], use: Use, device: int) -> Launch:
        problem, threads = plan.problem, plan.tile.threads
        blocks = use.resident_blocks(plan.arch, device, threads)
        return use.bind(device, (blocks,), threads, problem.H, problem.I)


INT4_24_SM90 = Sm90Int4_24()
