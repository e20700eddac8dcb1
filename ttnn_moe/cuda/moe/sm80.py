"""Compute capability 8.x and 12.x: sm80/grouped_gemm.cu, a launch a product.

The tiles fit in shared memory and keep copies in flight. Nobody has timed them on such a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...contract import Problem
from ..arch import Arch
from ..jit import load
from ..jit.load import Launch
from .family import Call
from .pairs import rows_an_expert
from .sorted import Sorted, SortedPlan
from .uses import Use, halves, row_steps

THREADS, WEIGHT_ROWS = 256, 128


@dataclass(frozen=True)
class GemmTile:
    """Rows of a tile, a multiple of 32, and stages of the pipeline."""

    max_n: int
    stages: int
    read_once: ClassVar[bool] = False

    @property
    def shared_memory(self) -> int:
        return self.stages * (WEIGHT_ROWS + self.max_n) * 128


# rows an expert gets on average, at most -> tile; where a block may have 163 KiB, and where 99
_TILES: tuple[tuple[float, GemmTile, GemmTile], ...] = (
    (24, GemmTile(32, 4), GemmTile(32, 4)),
    (64, GemmTile(64, 3), GemmTile(64, 4)),
    (float("inf"), GemmTile(128, 4), GemmTile(128, 3)),
)


class Sm80(Sorted[GemmTile]):
    """See the module's docstring."""

    name = "sm80"
    kernels = "CUDA C++ kernels of warp products"
    folder, targets = "sm80", "compute capability 8.x and 12.x"

    def tile(self, problem: Problem, arch: Arch) -> GemmTile:
        rows = rows_an_expert(problem)
        wide, narrow = next((wide, narrow) for most, wide, narrow in _TILES if rows <= most)
        return wide if arch.shared_memory >= 163 << 10 else narrow

    def product_uses(self, plan: SortedPlan[GemmTile]) -> tuple[Use, ...]:
        return tuple(plan.product("sm80/grouped_gemm", GATE_UP=first) for first in (True, False))

    def bind_products(self, plan: SortedPlan[GemmTile], uses: tuple[Use, ...], device: int) -> tuple[Launch, ...]:
        H, I = plan.problem.H, plan.problem.I
        sizes = (H, I, *row_steps(plan.problem.gate_up_order, H, I)), (I, H, H, I)
        blocks = [load.resident_blocks(use.spec, device, THREADS, use.shared_memory) for use in uses]
        return tuple(use.bind(device, (n,), THREADS, *last) for use, n, last in zip(uses, blocks, sizes, strict=True))

    def launch_products(
        self, launches: tuple[Launch, ...], stream: Any, call: Call, routed: tuple[int, int, int], act: int, rows: int
    ) -> None:
        (gate_up, down), experts = launches, call.experts
        weight = experts.tensors["down"].data_ptr()
        gate_up(stream, *halves(experts), call.hidden.data_ptr(), *routed, act)
        down(stream, weight, weight, act, *routed, rows)


SM80 = Sm80()
