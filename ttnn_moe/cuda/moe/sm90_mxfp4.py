"""MXFP4 experts on Hopper: both products in one launch of sm90/mxfp4_mlp.cu. The tiles were found on an H200."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ...activations import CLAMPED_SWIGLU
from ...contract import Experts, Problem
from ...formats.mxfp4 import BIASES, NAME
from ...formats.mxfp4_boxes import NAME as BOXES
from ...formats.ue8m0 import GROUP
from ...sizes import ceil_div
from ..arch import Arch, Target
from ..device import gpu
from ..jit import load
from ..jit.load import Launch
from ..maps import mxfp4_maps_of
from . import sort
from .cuda_cpp import arch_of, launches_of, why_not_products
from .family import Buffer, Call
from .mxfp4_few import mxfp4_limits
from .pairs import rows_an_expert
from .sorted import Sorted, SortedPlan
from .uses import Use, bias_pointers

UNIT = 128  # channels of a stage of rows
ORDER_THREADS = 256
_ALIGNMENT = 1024


@dataclass(frozen=True)
class Mxfp4Tile:
    """Sizes of mxfp4_mlp.cu.

    Attributes:
        max_n, weight_rows: rows of a tile at most; weight rows of an item.
        groups: warpgroups that multiply. weight_stages, row_stages: stages of 256 channels, and of row_units * 128.
        row_units: of 128 channels, in a stage of rows.
        blocks: resident, a multiprocessor.
        read_once: L2 evicts weights first, and drops each expert output that combine has read.
        scale_bytes: of the scales of an item, at most.
        warp_products: by mma.sync, with as many stages of rows as of weights; else by wgmma.
        direct: warps write their sums without shared memory.
        boxed: weights are mxfp4_boxes; a stage of them has its scales.
        by_columns: by wgmma, each number of rows in a loop of its own, with as many stages of rows as of weights.
    """

    max_n: int
    weight_rows: int
    groups: int
    weight_stages: int
    row_stages: int
    read_once: bool = False
    blocks: int = 1
    row_units: int = 1
    scale_bytes: int = 0
    warp_products: bool = False
    direct: bool = False
    boxed: bool = False
    by_columns: bool = False

    @property
    def granule(self) -> int:
        return 8 if self.warp_products or self.by_columns else 16

    @property
    def threads(self) -> int:
        return 128 * (1 + self.groups)

    @property
    def shared_memory(self) -> int:
        row = UNIT + 8 * self.boxed
        stages = self.weight_stages * self.weight_rows * row + self.row_stages * self.row_units * self.max_n * 2 * UNIT
        barriers = 16 * (self.weight_stages + self.row_stages) + 32 + 4 * 16 + 16 + 4 * 32
        pieces = 0 if self.direct else 64 * self.weight_rows
        return _ALIGNMENT + stages + pieces + 2 * self.scale_bytes + barriers


def _by_warps(max_n: int, blocks: int, groups: int, stages: int = 4, weight_rows: int = 128) -> Mxfp4Tile:
    return Mxfp4Tile(
        max_n,
        weight_rows,
        groups,
        weight_stages=stages,
        row_stages=stages,
        read_once=True,
        blocks=blocks,
        row_units=2,
        warp_products=True,
        direct=True,
    )


def _by_columns(max_n: int, stages: int, weight_rows: int = 256) -> Mxfp4Tile:
    return Mxfp4Tile(
        max_n,
        weight_rows,
        groups=4,
        weight_stages=stages,
        row_stages=stages,
        read_once=True,
        row_units=2,
        direct=True,
        boxed=True,
        by_columns=True,
    )


# rows an expert gets on average, at most -> tile
_TILES: tuple[tuple[float, Mxfp4Tile], ...] = (
    (0.7, _by_warps(8, 2, 2)),
    (5, _by_warps(8, 3, 1)),
    (12, _by_warps(16, 2, 2)),
    (20, _by_warps(32, 1, 4, weight_rows=256)),
    (48, Mxfp4Tile(48, 256, 4, 3, 2, read_once=True, row_units=2)),
    (float("inf"), Mxfp4Tile(144, 256, 2, 2, 3)),
)


# of arranged weights; the first where blocks have about two items of gate and up
_FEW_ITEMS, _OF_FEW_ITEMS = 1000, _by_warps(8, 2, 2, 3)
_BOXED_TILES: tuple[tuple[float, Mxfp4Tile], ...] = (
    (5, _by_warps(8, 4, 1)),
    (9, _by_warps(16, 3, 1)),
    (20, _by_columns(32, 2, weight_rows=512)),
    (40, _by_columns(48, 3)),
    (52, _by_columns(64, 3)),
    (68, _by_columns(80, 3)),
    (float("inf"), Mxfp4Tile(144, 256, 2, 2, 3)),
)


class Sm90Mxfp4(Sorted[Mxfp4Tile]):
    """See the module's docstring."""

    name = "mxfp4_sm90"
    kernels = "CUDA C++ kernels of warpgroup products, MXFP4 weights, bf16 activations"
    weight_format = NAME
    least_tile = 8

    def why_not(self, problem: Problem, target: Target) -> str | None:
        reason = mxfp4_limits(problem, target, self.weight_format) or why_not_products(target, "sm90")
        if reason is not None:
            return reason
        arch = arch_of(target)
        if self.tile(problem, arch).shared_memory > arch.shared_memory:
            return f"H={problem.H} and I={problem.I} take more shared memory for scales than {arch.name} has"
        return None

    def kernel(self, tile: Mxfp4Tile) -> str:
        return "sm90/mxfp4_mlp"

    def tile(self, problem: Problem, arch: Arch) -> Mxfp4Tile:
        rows = rows_an_expert(problem)
        tile = next(tile for most, tile in _TILES if rows <= most)
        return fitted(tile, problem, arch)

    def scratch(self, plan: SortedPlan[Mxfp4Tile]) -> tuple[Buffer, ...]:
        """Those of Sorted, and the rows of hidden in the order of channels that the products take."""
        problem, dtype = plan.problem, plan.problem.dtype
        _, rows, words = super().scratch(plan)
        act = Buffer((problem.T * problem.K, _units(problem.I)), dtype)
        return act, rows, words, Buffer((problem.T, _units(problem.H)), dtype)

    def uses(self, plan: SortedPlan[Mxfp4Tile], ids64: bool, add: bool) -> tuple[Use, ...]:
        *sorts, product, combine = super().uses(plan, ids64, add)
        return *sorts, Use.of(plan.arch, "sm90/mxfp4_order"), product, combine

    def product_defines(self, problem: Problem) -> dict[str, object]:
        return {
            "INTERLEAVED": problem.gate_up_order == "interleaved",
            "CLAMPED": problem.activation == CLAMPED_SWIGLU,
            "BIASED": problem.biased,
        }

    def bind(self, plan: SortedPlan[Mxfp4Tile], uses: tuple[Use, ...], device: int) -> tuple[Launch, ...]:
        *sorts, order, product, combine = uses
        problem = plan.problem
        eights = problem.T * _units(problem.H) // 8
        sizes = problem.T, problem.H
        ordered = order.bind(device, (ceil_div(eights, ORDER_THREADS),), ORDER_THREADS, *sizes)
        *bound, last = super().bind(plan, (*sorts, product, combine), device)
        return *bound[:-1], ordered, bound[-1], last

    def bind_product(self, plan: SortedPlan[Mxfp4Tile], use: Use, device: int) -> Launch:
        sizes = plan.problem.H, plan.problem.I
        return use.bind(device, (plan.tile.blocks * gpu(device).multiprocessors,), plan.tile.threads, *sizes)

    def launch(self, plan: SortedPlan[Mxfp4Tile], call: Call, buffers: tuple[Tensor, ...]) -> None:
        (*sorts, order, product, combine), routing, words = launches_of(self, plan, call), call.routing, plan.words
        act, rows, at, ordered = (buffer.data_ptr() for buffer in buffers)
        tensors, route = call.experts.tensors, call.route
        scales = (tensors[name].data_ptr() for name in ("gate_up_scales", "down_scales"))
        bias = [address for name in BIASES for address in bias_pointers(tensors.get(name))]
        stream = load.stream(call.hidden.device.index)
        sort.launch_sorts(sorts, stream, route, at, words)
        order(stream, call.hidden.data_ptr(), ordered)
        routed = at, at + words.tiles, at + words.num_tiles
        product(stream, *self.blocks(call.experts), *scales, *bias, ordered, *routed, act, rows)
        combine(stream, rows, at + words.inverse, routing.topk_weights.data_ptr(), route[2], call.out.data_ptr())

    def blocks(self, experts: Experts) -> tuple[Any, Any]:
        """What the products take for blocks of gate_up and of down."""
        return mxfp4_maps_of(experts)


class Sm90Mxfp4Boxes(Sm90Mxfp4):
    """The same of arranged weights, whose boxes are contiguous."""

    name = "mxfp4_boxes_sm90"
    kernels = "CUDA C++ kernels of warpgroup products, arranged MXFP4 weights, bf16 activations"
    weight_format = BOXES

    def tile(self, problem: Problem, arch: Arch) -> Mxfp4Tile:
        rows = rows_an_expert(problem)
        tile = next(tile for most, tile in _BOXED_TILES if rows <= most)
        if min(problem.T * problem.K, problem.E) * ceil_div(2 * problem.I, 128) <= _FEW_ITEMS and rows <= 1:
            tile = _OF_FEW_ITEMS
        return fitted(replace(tile, boxed=True), problem, arch)

    def blocks(self, experts: Experts) -> tuple[Any, Any]:
        return experts.tensors["gate_up_blocks"].data_ptr(), experts.tensors["down_blocks"].data_ptr()


def _units(channels: int) -> int:
    """Channels of whole units."""
    return ceil_div(channels, UNIT) * UNIT


def fitted(tile: Mxfp4Tile, problem: Problem, arch: Arch) -> Mxfp4Tile:
    """A tile with room for the scales of a problem, and fewer stages or rows where it does not fit otherwise."""
    wide = max(problem.H, problem.I) // GROUP
    # a line of 128 bytes that holds the ends of two boxes should stay in L2 until the second comes
    once = tile.read_once and (tile.boxed or (problem.H % 256 == 0 and problem.I % 256 == 0))
    tile = replace(tile, scale_bytes=0 if tile.boxed else tile.weight_rows * wide, read_once=once)
    while tile.blocks * (tile.shared_memory + 1024) > arch.shared_memory + 1024:
        if (tile.warp_products or tile.by_columns) and tile.weight_stages > 2:
            tile = replace(tile, weight_stages=tile.weight_stages - 1, row_stages=tile.weight_stages - 1)
        elif tile.row_stages > 3:
            tile = replace(tile, row_stages=tile.row_stages - 1)
        elif tile.weight_stages > 2:
            tile = replace(tile, weight_stages=tile.weight_stages - 1)
        elif tile.row_stages > 2 and not tile.direct:
            tile = replace(tile, direct=True)
        elif tile.row_stages > 2:
            tile = replace(tile, row_stages=2)
        elif tile.weight_rows > 128:
            groups = min(tile.groups, 2)  # of 64 rows or more each
            tile = replace(tile, weight_rows=128, groups=groups, scale_bytes=0 if tile.boxed else 128 * wide)
        elif tile.max_n > 32:
            tile = replace(tile, max_n=tile.max_n // 32 * 16)  # half of it, a multiple of 16
        else:
            break
    return tile


MXFP4_SM90 = Sm90Mxfp4()
MXFP4_BOXES_SM90 = Sm90Mxfp4Boxes()
