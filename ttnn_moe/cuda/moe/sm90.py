"""Hopper: both products in one launch of sm90/grouped_mlp.cu. The tiles were found on an H200."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...contract import Problem
from ..arch import Target
from ..device import gpu
from ..jit.load import Launch
from ..maps import maps_of
from . import sort
from .cuda_cpp import arch_of, dense_limits
from .family import Call
from .pairs import rows_an_expert
from .sorted import Sorted, SortedPlan
from .uses import Use

THREADS = 384
BARRIERS_AND_ALIGNMENT = 1024 + 16 * 12 + 16 * 4 + 32 * 4


@dataclass(frozen=True)
class MlpTile:
    """Sizes of grouped_mlp.cu.

    Attributes:
        max_n, stages, weight_rows: rows of a tile at most, stages of the pipeline, weight rows of an item.
        read_once: L2 evicts weights first, since few experts have a second tile, and what combine has read; so
            that expert outputs need not go to memory.
    """

    max_n: int
    stages: int
    weight_rows: int = 256
    read_once: bool = False

    @property
    def shared_memory(self) -> int:
        pieces = 64 * self.weight_rows
        return self.stages * (self.weight_rows + self.max_n) * 128 + pieces + BARRIERS_AND_ALIGNMENT

    @property
    def defines(self) -> dict[str, int]:
        return {
            "MAX_N": self.max_n,
            "STAGES": self.stages,
            "WEIGHT_ROWS": self.weight_rows,
            "READ_ONCE": self.read_once,
        }


# rows an expert gets on average, at most -> sizes
_TILES: tuple[tuple[float, MlpTile], ...] = (
    (12, MlpTile(32, 10, 128, read_once=True)),
    (40, MlpTile(64, 9, 128, read_once=True)),
    (72, MlpTile(80, 7, 128, read_once=True)),
    (400, MlpTile(160, 4)),
    (float("inf"), MlpTile(176, 3)),
)


class Sm90(Sorted[MlpTile]):
    """See the module's docstring."""

    name = "sm90"
    kernels = "CUDA C++ kernels of warpgroup products"

    def why_not(self, problem: Problem, target: Target) -> str | None:
        arch, reason = target.arch, dense_limits(problem, target)
        if reason is None and arch is not None and arch.products != "sm90":
            reason = f"its code is for sm_90a, not {arch.name}"
        return reason

    def plan(self, problem: Problem, target: Target) -> SortedPlan[MlpTile]:
        rows, arch = rows_an_expert(problem), arch_of(target)
        tile = next(tile for most, tile in _TILES if rows <= most)
        return SortedPlan(problem, arch, tile, sort.choose(problem, arch))

    def product_uses(self, plan: SortedPlan[MlpTile]) -> tuple[Use, ...]:
        sizes = {"FP16": plan.problem.dtype == torch.float16, **plan.tile.defines}
        return (Use.of(plan.arch, "sm90/grouped_mlp", plan.tile.shared_memory, **sizes),)

    def bind_products(self, plan: SortedPlan[MlpTile], uses: tuple[Use, ...], device: int) -> tuple[Launch, ...]:
        return (uses[0].bind(device, (gpu(device).multiprocessors,), THREADS, plan.problem.H, plan.problem.I),)

    def products(
        self,
        launches: tuple[Launch, ...],
        stream: object,
        call: Call,
        routed: tuple[int, int, int],
        act: int,
        rows: int,
    ) -> None:
        maps = maps_of(call.experts)
        launches[0](stream, maps.gate_up, maps.down, call.hidden.data_ptr(), *routed, act, rows)


SM90 = Sm90()
