"""Compute capability 8.x and 12.x: both products in one launch of sm80/grouped_mlp.cu.

The tiles were found on an H100 that ran compute_80 code. Nobody has timed them on such a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...contract import Problem
from ..arch import Arch
from ..jit.load import Launch
from .family import Call
from .pairs import rows_an_expert
from .sorted import SortedDense, SortedPlan
from .uses import Use, halves, row_steps

ITEMS = 16 * 32  # bytes of claimed items


@dataclass(frozen=True)
class WarpTile:
    """Sizes of grouped_mlp.cu.

    Attributes:
        warps_m, warps_n: warps along the weight rows, 64 each, and along the rows of a tile.
        max_n, k_block, stages: rows of a tile at most, elements of a row in a stage, stages of the pipeline.
        blocks: resident blocks a multiprocessor, at least.
        read_once: L2 evicts weights first, since few experts have a second tile; it also drops each expert output
            that combine has read. Expert outputs then need not go to memory.
    """

    warps_m: int
    warps_n: int
    max_n: int
    stages: int
    k_block: int = 64
    blocks: int = 1
    read_once: bool = False

    @property
    def granule(self) -> int:
        return 8 * self.warps_n

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def shared_memory(self) -> int:
        return self.stages * (64 * self.warps_m + self.max_n) * self.k_block * 2 + ITEMS


# rows an expert gets on average, at most -> tile; where a block may have 163 KiB, and where 99
_TILES: tuple[tuple[float, WarpTile, WarpTile], ...] = (
    (24, WarpTile(1, 2, 32, 6, blocks=2, read_once=True), WarpTile(2, 2, 32, 4, read_once=True)),
    (40, WarpTile(2, 2, 64, 6, read_once=True), WarpTile(2, 2, 64, 4, read_once=True)),
    (72, WarpTile(2, 2, 96, 5, read_once=True), WarpTile(2, 2, 96, 3, read_once=True)),
    (144, WarpTile(4, 2, 160, 3, read_once=True), WarpTile(2, 2, 128, 3, read_once=True)),
    (float("inf"), WarpTile(4, 2, 160, 3), WarpTile(4, 2, 128, 4, k_block=32)),
)


class Sm80(SortedDense[WarpTile]):
    """See the module's docstring."""

    name = "sm80"
    kernels = "CUDA C++ kernels of warp products"
    folder = "sm80"

    def tile(self, problem: Problem, arch: Arch) -> WarpTile:
        rows = rows_an_expert(problem)
        wide, narrow = next((wide, narrow) for most, wide, narrow in _TILES if rows <= most)
        return wide if arch.shared_memory >= 163 << 10 else narrow

    def tiles(self) -> tuple[WarpTile, ...]:
        return tuple(tile for _, *tiles in _TILES for tile in tiles)

    def bind_product(self, plan: SortedPlan[WarpTile], use: Use, device: int) -> Launch:
        H, I = plan.problem.H, plan.problem.I
        steps = row_steps(plan.problem.gate_up_order, H, I)
        return use.bind_resident(plan.arch, device, plan.tile.threads, H, I, *steps)

    def launch_product(
        self, product: Launch, stream: Any, call: Call, routed: tuple[int, int, int], act: int, rows: int
    ) -> None:
        experts = call.experts
        weights = *halves(experts), experts.tensors["down"].data_ptr()
        product(stream, *weights, call.hidden.data_ptr(), *routed, act, rows)


SM80 = Sm80()
