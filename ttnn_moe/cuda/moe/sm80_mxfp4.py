"""MXFP4 experts on sm_80 and newer: both products in one launch of sm80/mxfp4_{narrow,many}.cu.

The tiles were found on an H200 and on H100s that ran sm_80 code. Nobody has timed them on another GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...contract import Problem
from ...formats.mxfp4 import NAME
from ...sizes import ceil_div
from ..arch import Arch, Target
from ..jit.load import Launch
from .family import Call
from .mxfp4_few import activation_defines, mxfp4_limits, weight_pointers
from .pairs import rows_an_expert
from .sorted import SortedPlan, SortedProduct
from .uses import Use, gate_up_rows

ITEMS = 5 * 32  # bytes of claimed items, and of what they have in common


@dataclass(frozen=True)
class NarrowTile:
    """Sizes of mxfp4_narrow.cu.

    Attributes:
        warps, max_n: warps of a block, which share the channels; rows of a tile at most.
        depth: chunks of 128 channels in a warp's ring. blocks: resident blocks a multiprocessor, at least.
    """

    warps: int
    max_n: int
    depth: int
    blocks: int

    granule = 4
    read_once = True

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_memory(self) -> int:
        """Without scales."""
        return self.warps * (self.depth * (4096 + 256 * self.max_n) + self.max_n * 272) + ITEMS

    def memory(self, problem: Problem) -> int:
        """Bytes of a block."""
        return self.shared_memory + 4 * max(problem.H, problem.I)

    def fits(self, problem: Problem, arch: Arch) -> bool:
        """Whether a multiprocessor has room for a block."""
        return arch.holds(1, self.memory(problem))


@dataclass(frozen=True)
class ManyTile:
    """Sizes of mxfp4_many.cu.

    Attributes:
        warps: of a block, 32 weight rows each. max_n, stages: rows of a tile at most, stages of 128 channels.
        blocks: resident blocks a multiprocessor, at least.
    """

    warps: int
    max_n: int
    stages: int
    blocks: int = 1

    granule = 8
    read_once = False

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_memory(self) -> int:
        index = 4 * self.threads * ceil_div(16 * self.max_n, self.threads)
        return self.stages * (2304 * self.warps + 256 * self.max_n) + index + 17 * 32

    def memory(self, problem: Problem) -> int:
        """Bytes of a block."""
        return self.shared_memory

    def fits(self, problem: Problem, arch: Arch) -> bool:
        """Whether a multiprocessor has room for all blocks."""
        return arch.holds(self.blocks, self.memory(problem))


AnyTile = NarrowTile | ManyTile


# rows an expert gets on average, at most -> tile; the first that fits
_TILES: tuple[tuple[float, AnyTile], ...] = (
    (5, NarrowTile(4, 8, 2, 3)),
    (26, ManyTile(8, 32, 3, blocks=2)),
    (14, ManyTile(8, 16, 2, blocks=2)),  # with 99 KiB of shared memory
    (42, ManyTile(8, 48, 2, blocks=2)),
    (56, ManyTile(12, 64, 3)),
    (56, ManyTile(12, 64, 2)),  # with 99 KiB
    (80, ManyTile(12, 96, 3)),
    (float("inf"), ManyTile(8, 128, 3)),
    (float("inf"), ManyTile(8, 96, 2)),  # with 99 KiB
)


class Sm80Mxfp4(SortedProduct[AnyTile]):
    """See the module's docstring."""

    name = "mxfp4"
    kernels = "CUDA C++ kernels of MXFP4 weights"
    weight_format = NAME
    least_tile = 8

    def why_not(self, problem: Problem, target: Target) -> str | None:
        return mxfp4_limits(problem, target)

    def kernel(self, tile: AnyTile) -> str:
        return {NarrowTile: "sm80/mxfp4_narrow", ManyTile: "sm80/mxfp4_many"}[type(tile)]

    def tile(self, problem: Problem, arch: Arch) -> AnyTile:
        rows = rows_an_expert(problem)
        return next(tile for most, tile in _TILES if rows <= most and tile.fits(problem, arch))

    def uses(self, plan: SortedPlan[AnyTile], ids64: bool, add: bool) -> tuple[Use, ...]:
        *sorts, product, combine = super().uses(plan, ids64, add)
        problem = plan.problem
        of = plan.product(self.kernel(plan.tile), **activation_defines(problem))
        product = replace(of, shared_memory=plan.tile.memory(problem))
        return *sorts, product, combine

    def bind_product(self, plan: SortedPlan[AnyTile], use: Use, device: int) -> Launch:
        problem = plan.problem
        rows = gate_up_rows(problem.gate_up_order, problem.I)
        return use.bind_resident(plan.arch, device, plan.tile.threads, problem.H, problem.I, *rows)

    def launch_product(
        self, product: Launch, stream: Any, call: Call, routed: tuple[int, int, int], act: int, rows: int
    ) -> None:
        product(stream, *weight_pointers(call), call.hidden.data_ptr(), *routed, act, rows)


MXFP4 = Sm80Mxfp4()
