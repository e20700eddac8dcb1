"""Launches of gpu_kernels/cuda/combine/few_{dispatch,combine}.cu: few tokens in one node, in one hop.

Half of what travels is flags. So these take few tokens, where waiting for other ranks costs more than bytes do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...errors import ContractError
from .kernel import aligned
from .node import NodeCombinePlan, NodeDispatchPlan, NodePlan

WARPS = 8
"""Of a block."""
COLUMNS = 256
"""That a warp moves at a time."""
MOST_BYTES = 1 << 15
"""Of a rank's tokens: above, bytes cost more than waiting."""


def blocks(rows: int, H: int, most: int) -> int:
    """Multiprocessors of a launch for so many rows of a rank: a warp moves COLUMNS of one."""
    return min(most, -(-rows * -(-H // COLUMNS) // WARPS))


@dataclass(frozen=True)
class _FewPlan(NodePlan):
    """What both plans share."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bulk:
            raise ContractError("few tokens travel as words", got="bulk=True", expected="bulk=False")

    @property
    def W(self) -> int:
        return self.channels or WARPS


@dataclass(frozen=True)
class FewDispatchPlan(_FewPlan, NodeDispatchPlan):
    """See NodeDispatchPlan."""

    kernel: ClassVar[str] = "few_dispatch"

    @property
    def parts(self) -> tuple[int, ...]:
        """Where the heap's rows, ids, weights and origins begin, and its end; bytes."""
        A = self.R * self.T
        ids = self.head + aligned(A * self.H * 2)
        weights = ids + aligned(A * self.K * 4)
        origins = weights + aligned(A * self.K * 4)
        tokens = origins + aligned(A * 4)
        pairs = tokens + aligned(2 * self.R * 8) + aligned(2 * A * 8)
        return self.head, ids, weights, origins, pairs + aligned(2 * A * self.K * 16) + aligned(2 * A * self.H * 4)


@dataclass(frozen=True)
class FewCombinePlan(_FewPlan, NodeCombinePlan):
    """See NodeCombinePlan."""

    kernel: ClassVar[str] = "few_combine"

    @property
    def heap(self) -> int:
        A = self.R * self.T
        return self.head + aligned(A * self.H * 2) + aligned(2 * A * self.H * 4)
