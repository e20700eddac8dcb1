"""Compute capability 8.x and 12.x: sm80/grouped_gemm.cu, a launch a product.

Tiles fit and keep copies in flight; they were never timed on a GPU that they are for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ...contract import Problem
from ..arch import Target
from ..jit import load
from ..jit.load import Launch
from . import sort
from .cuda_cpp import arch_of, dense_limits
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

    @property
    def defines(self) -> dict[str, int]:
        return {"MAX_N": self.max_n, "STAGES": self.stages}


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

    def why_not(self, problem: Problem, target: Target) -> str | None:
        arch, reason = target.arch, dense_limits(problem, target)
        if reason is None and arch is not None and arch.products != "sm80":
            reason = f"its code is for compute capability 8.x and 12.x, not {arch.name}"
        return reason

    def plan(self, problem: Problem, target: Target) -> SortedPlan[GemmTile]:
        rows, arch = rows_an_expert(problem), arch_of(target)
        wide, narrow = next((wide, narrow) for most, wide, narrow in _TILES if rows <= most)
        tile = wide if arch.shared_memory >= 163 << 10 else narrow
        return SortedPlan(problem, arch, tile, sort.choose(problem, arch))

    def product_uses(self, plan: SortedPlan[GemmTile]) -> tuple[Use, ...]:
        sizes = {"FP16": plan.problem.dtype == torch.float16, **plan.tile.defines}
        room = plan.tile.shared_memory
        return tuple(Use.of(plan.arch, "sm80/grouped_gemm", room, GATE_UP=first, **sizes) for first in (True, False))

    def bind_products(self, plan: SortedPlan[GemmTile], uses: tuple[Use, ...], device: int) -> tuple[Launch, ...]:
        H, I = plan.problem.H, plan.problem.I
        sizes = (H, I, *row_steps(plan.problem.gate_up_order, H, I)), (I, H, H, I)
        return tuple(
            use.bind(device, (_resident_blocks(use, device),), THREADS, *last)
            for use, last in zip(uses, sizes, strict=True)
        )

    def products(
        self,
        launches: tuple[Launch, ...],
        stream: object,
        call: Call,
        routed: tuple[int, int, int],
        act: int,
        rows: int,
    ) -> None:
        (gate_up, down), experts = launches, call.experts
        weight = experts.tensors["down"].data_ptr()
        gate_up(stream, *halves(experts), call.hidden.data_ptr(), *routed, act)
        down(stream, weight, weight, act, *routed, rows)


def _resident_blocks(use: Use, device: int) -> int:
    return load.resident_blocks(use.spec, device, THREADS, use.shared_memory)


SM80 = Sm80()
