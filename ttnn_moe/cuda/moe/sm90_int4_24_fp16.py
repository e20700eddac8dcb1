"""int4_24 experts on Hopper in fp16, which holds an int4 times its scale exactly: sm90/int4_24_mlp.cu.

The tiles were found on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...contract import Problem
from ...formats.int4_24 import NAME
from ...sizes import ceil_div
from ..arch import Arch, Target
from ..jit import load
from ..jit.load import Launch
from . import sort
from .cuda_cpp import launches_of, limits, why_not_products
from .family import Buffer, Call
from .sm90_sparse import SparseRing, SparseRingTile
from .sorted import SortedPlan
from .uses import Use

BLOCK_CHANNELS = 128
"""Rows are stored in whole blocks of so many channels."""
_ROW_THREADS = 256


@dataclass(frozen=True)
class Fp16Tile(SparseRingTile):
    """Sizes of int4_24_mlp.cu."""

    @property
    def granule(self) -> int:
        return 8

    @property
    def shared_memory(self) -> int:
        return self.ring(128) + (self.stages + 1) * self.max_n * 4 + 8


_FEW_ROWS = 2
"""Of an expert on average, for which sm90/int4_24_quads_mlp.cu is as fast."""
# pairs (T * K) over experts, at most -> tile
_TILES: tuple[tuple[float, Fp16Tile], ...] = (
    (4, Fp16Tile(8, 2, 8, 3, warps=16, read_once=True)),
    (10, Fp16Tile(16, 2, 8, 2, warps=16, read_once=True)),
    (18, Fp16Tile(24, 2, 8, 2, warps=16, read_once=True)),
    (40, Fp16Tile(48, 2, 6, 3, warps=12, read_once=True)),
    (72, Fp16Tile(80, 2, 4, 3)),
    (float("inf"), Fp16Tile(144, 2, 2, 4)),
)


class Sm90Int4_24Fp16(SparseRing[Fp16Tile]):
    """See the module's docstring."""

    name = "int4_24_fp16_sm90"
    kernels = "CUDA C++ kernels of int4_24 words, copies by the copy engine, sparse warpgroup products of fp16"
    weight_format = NAME
    least_tile = 8

    def why_not(self, problem: Problem, target: Target) -> str | None:
        reason = limits(problem, target, self.weight_format, (torch.bfloat16,)) or why_not_products(target, "sm90")
        if reason is None and not problem.fp16_scales:
            reason = "it multiplies in fp16, and no one found out that fp16 holds the scales (Experts.int4_24 does)"
        if reason is None and problem.T * problem.K <= _FEW_ROWS * problem.E:
            reason = f"it runs more than {_FEW_ROWS} rows an expert, not {problem.T * problem.K} on {problem.E}"
        return reason

    def kernel(self, tile: Fp16Tile) -> str:
        return "sm90/int4_24_mlp"

    def tile(self, problem: Problem, arch: Arch) -> Fp16Tile:
        rows = problem.T * problem.K / problem.E
        return next(tile for most, tile in _TILES if rows <= most)

    def tiles(self) -> tuple[Fp16Tile, ...]:
        return tuple(tile for _, tile in _TILES)

    def prepares(self, plan: SortedPlan[Fp16Tile]) -> bool:
        return True

    def scratch(self, plan: SortedPlan[Fp16Tile]) -> tuple[Buffer, ...]:
        """Those of Sorted, activations in whole blocks of channels; hidden in fp16; powers of rows of both."""
        problem, (_, rows, words) = plan.problem, super().scratch(plan)
        P, H, I = problem.T * problem.K, *(_padded(channels) for channels in (problem.H, problem.I))
        return (
            Buffer((P, I), torch.int16),
            rows,
            words,
            Buffer((problem.T, H), torch.float16),
            Buffer((problem.T,), torch.float32),
            Buffer((P,), torch.float32),
        )

    def uses(self, plan: SortedPlan[Fp16Tile], ids64: bool, add: bool) -> tuple[Use, ...]:
        rows = Use.of(plan.arch, "sm90/int4_24_rows", 4 * _ROW_THREADS // 32)
        return rows, *super().uses(plan, ids64, add)

    def bind(self, plan: SortedPlan[Fp16Tile], uses: tuple[Use, ...], device: int) -> tuple[Launch, ...]:
        rows, *others = uses
        bound = rows.bind(device, (plan.problem.T,), _ROW_THREADS, plan.problem.H)
        return bound, *super().bind(plan, tuple(others), device)

    def launch(self, plan: SortedPlan[Fp16Tile], call: Call, buffers: tuple[Tensor, ...]) -> None:
        (to_rows, *sorts, product, combine), routing, words = launches_of(self, plan, call), call.routing, plan.words
        act, rows, at, hidden, hidden_powers, act_powers = (buffer.data_ptr() for buffer in buffers)
        w13, w2 = (call.experts.tensors[name].data_ptr() for name in ("w13", "w2"))
        stream: Any = load.stream(call.hidden.device.index)
        route = call.route
        to_rows(stream, call.hidden.data_ptr(), hidden, hidden_powers)
        sort.launch_sorts(sorts, stream, route, at, words)
        tiles = at + words.tiles, at + words.num_tiles
        product(stream, w13, w2, hidden, hidden_powers, at, *tiles, act, act_powers, rows)
        combine(stream, rows, at + words.inverse, routing.topk_weights.data_ptr(), route[2], call.out.data_ptr())


def _padded(channels: int) -> int:
    return ceil_div(channels, BLOCK_CHANNELS) * BLOCK_CHANNELS


INT4_24_FP16_SM90 = Sm90Int4_24Fp16()
