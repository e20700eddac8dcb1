"""int4_24 experts on Hopper, few rows each: sm90/int4_24_quads_mlp.cu. The tile was found on an H200."""

from __future__ import annotations

from dataclasses import dataclass

from ...contract import Problem
from ..arch import Arch, Target
from .cuda_cpp import why_not_products
from .int4_24_sorted import SortedInt4_24
from .sm90_sparse import SparseRing, SparseRingTile
from .sorted import SortedPlan


@dataclass(frozen=True)
class Sm90SparseTile(SparseRingTile):
    """Sizes of int4_24_quads_mlp.cu."""

    @property
    def granule(self) -> int:
        return 2

    @property
    def shared_memory(self) -> int:
        return self.ring(4 * 128)


_MOST_ROWS = 4
"""Of an expert on average: with more, the kernels of sm_80 are faster. Above 2, those of fp16 come first."""
_TILE = Sm90SparseTile(8, 2, 6, 3, warps=16, read_once=True)


class Sm90Int4_24(SparseRing[Sm90SparseTile], SortedInt4_24[Sm90SparseTile]):
    """See the module's docstring."""

    name = "int4_24_sm90"
    kernels = "CUDA C++ kernels of int4_24 words, copies by the copy engine, sparse warpgroup products"

    def why_not(self, problem: Problem, target: Target) -> str | None:
        reason = super().why_not(problem, target) or why_not_products(target, "sm90")
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


INT4_24_SM90 = Sm90Int4_24()
