"""Hopper: both products in one launch of sm90/grouped_mlp.cu. The tiles were found on an H200."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ...contract import Problem
from ..arch import Arch
from ..device import gpu
from ..jit.load import Launch
from ..maps import maps_of
from .family import Call
from .pairs import rows_an_expert
from .sorted import SortedDense, SortedPlan
from .uses import Use

THREADS = 384
BARRIERS_AND_ALIGNMENT = 1024 + 16 * 12 + 16 * 4 + 32 * 4


@dataclass(frozen=True)
class MlpTile:
    """Sizes of grouped_mlp.cu.

    Attributes:
        max_n, stages, weight_rows: rows of a tile at most, stages of the pipeline, weight rows of an item.
        read_once: L2 evicts weights first, since few experts have a second tile; it also drops each expert output
            that combine has read. Expert outputs then need not go to memory.
    """

    max_n: int
    stages: int
    weight_rows: int = 256
    read_once: bool = False
    granule: ClassVar[int] = 8

    @property
    def shared_memory(self) -> int:
        pieces = 64 * self.weight_rows
        return self.stages * (self.weight_rows + self.max_n) * 128 + pieces + BARRIERS_AND_ALIGNMENT


# rows an expert gets on average, at most -> sizes
_TILES: tuple[tuple[float, MlpTile], ...] = (
    (12, MlpTile(32, 10, 128, read_once=True)),
    (40, MlpTile(64, 9, 128, read_once=True)),
    (72, MlpTile(80, 7, 128, read_once=True)),
    (400, MlpTile(160, 4)),
    (float("inf"), MlpTile(176, 3)),
)


class Sm90(SortedDense[MlpTile]):
    """See the module's docstring."""

    name = "sm90"
    kernels = "CUDA C++ kernels of warpgroup products"
    folder = "sm90"

    def tile(self, problem: Problem, arch: Arch) -> MlpTile:
        rows = rows_an_expert(problem)
        return next(tile for most, tile in _TILES if rows <= most)

    def tiles(self) -> tuple[MlpTile, ...]:
        return tuple(tile for _, tile in _TILES)

    def bind_product(self, plan: SortedPlan[MlpTile], use: Use, device: int) -> Launch:
        return use.bind(device, (gpu(device).multiprocessors,), THREADS, plan.problem.H, plan.problem.I)

    def launch_product(
        self, product: Launch, stream: Any, call: Call, routed: tuple[int, int, int], act: int, rows: int
    ) -> None:
        product(stream, *maps_of(call.experts), call.hidden.data_ptr(), *routed, act, rows)


SM90 = Sm90()
