"""What the families of sparse warpgroup products on Hopper share: a tile's sizes, and the launch of both products."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeVar

from ...contract import Problem
from ..jit.load import Launch
from .sorted import Sorted, SortedPlan
from .uses import Use

_ALIGNMENT, _SLOTS = 1024, 4


@dataclass(frozen=True)
class SparseRingTile(ABC):
    """Sizes of a tile whose stages hold words of int4_24 and rows.

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
    @abstractmethod
    def granule(self) -> int: ...

    @property
    @abstractmethod
    def shared_memory(self) -> int: ...

    @property
    def weight_rows(self) -> int:
        return 16 * self.m_tiles * self.warps

    @property
    def threads(self) -> int:
        return 32 * (self.warps + 4)

    def ring(self, row_bytes: int) -> int:
        """Bytes of the stages, of their barriers and of the items; row_bytes: of a row's channels of one slab."""
        stage = self.slabs * (16 * self.weight_rows + 64 + row_bytes * self.max_n)
        return _ALIGNMENT + self.stages * (stage + 16) + _SLOTS * (16 + 32) + 16


RingTileT = TypeVar("RingTileT", bound=SparseRingTile)


class SparseRing(Sorted[RingTileT]):
    """Both products in one launch, by as many blocks as are resident."""

    def product_defines(self, problem: Problem) -> dict[str, object]:
        return {"INTERLEAVED": problem.gate_up_order == "interleaved"}

    def bind_product(self, plan: SortedPlan[RingTileT], use: Use, device: int) -> Launch:
        return use.bind_resident(plan.arch, device, plan.tile.threads, plan.problem.H, plan.problem.I)
