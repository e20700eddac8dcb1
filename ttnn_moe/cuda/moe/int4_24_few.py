"""int4_24 experts, few pairs without a sort: sm80/int4_24_few_gate_up.cu and sm80/int4_24_few_down.cu.

FewInt4_24 is what families of such kernels share.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ...contract import Problem
from ...formats.int4_24 import NAME
from ...sizes import ceil_div
from ..arch import Arch, Target
from ..jit import load
from ..jit.load import Launch
from .cuda_cpp import CudaCpp, arch_of, launches_of, limits
from .family import Buffer, Call
from .pairs import why_not_few
from .uses import Use, gate_up_rows

MOST_PAIRS = 24
_ZEROS = 64  # bytes in front of activations


def _of_warp(tiles: int, depth: int) -> int:
    """Shared memory of a warp: sums of its rows, and its ring."""
    return tiles * 64 + depth * 2 * (tiles * 256 + 64)


@dataclass(frozen=True)
class ColumnSizes:
    """Sizes of both kernels: see their sources.

    Attributes:
        warps: of a block of the first kernel, which share the channels.
        up_tiles, down_tiles: products of 16 rows a warp, 2 or 4.
        up_depth, down_depth: pairs of slabs of 64 channels in a warp's ring.
    """

    warps: int = 4
    up_tiles: int = 2
    down_tiles: int = 2
    up_depth: int = 4
    down_depth: int = 4


SizesT = TypeVar("SizesT")


@dataclass(frozen=True, eq=False)
class ColumnPlan(Generic[SizesT]):
    problem: Problem
    arch: Arch
    sizes: SizesT


class FewInt4_24(CudaCpp[ColumnPlan[SizesT]]):
    """Gate and up of each pair, then down and the weighted sum of each token. The least host time: two launches."""

    weight_format = NAME
    rounds_expert_out = False

    @abstractmethod
    def sizes(self, problem: Problem) -> SizesT:
        """Sizes of both kernels."""

    @abstractmethod
    def memory(self, problem: Problem, sizes: SizesT) -> tuple[int, int]:
        """Bytes of shared memory of a block of both kernels."""

    def why_not(self, problem: Problem, target: Target) -> str | None:
        reason = limits(problem, target, self.weight_format, (torch.bfloat16,)) or why_not_few(problem, MOST_PAIRS)
        if reason is not None:
            return reason
        arch = arch_of(target)
        for name, room in zip("HI", self.memory(problem, self.sizes(problem)), strict=True):
            if room > arch.shared_memory:
                return f"{name} takes {room} bytes of shared memory, and {arch.name} has {arch.shared_memory}"
        return None

    def plan(self, problem: Problem, target: Target) -> ColumnPlan[SizesT]:
        return ColumnPlan(problem, arch_of(target), self.sizes(problem))

    def scratch(self, plan: ColumnPlan[SizesT]) -> tuple[Buffer, ...]:
        problem = plan.problem
        return (Buffer((problem.T * problem.K, problem.I), problem.dtype),)

    def launch(self, plan: ColumnPlan[SizesT], call: Call, buffers: tuple[Tensor, ...]) -> None:
        gate_up, down = launches_of(self, plan, call)
        hidden, routing = call.hidden, call.routing
        w13, w2 = (call.experts.tensors[name].data_ptr() for name in ("w13", "w2"))
        stream, act = load.stream(hidden.device.index), buffers[0].data_ptr()
        route = call.route
        gate_up(stream, hidden.data_ptr(), w13, *route, act)
        down(stream, act, w2, *route, routing.topk_weights.data_ptr(), call.out.data_ptr())


class Int4_24Few(FewInt4_24[ColumnSizes]):
    """See the module's docstring."""

    name = "int4_24_few"
    kernels = "CUDA C++ kernels of int4_24 words, few pairs"

    def sizes(self, problem: Problem) -> ColumnSizes:
        return ColumnSizes()

    def memory(self, problem: Problem, sizes: ColumnSizes) -> tuple[int, int]:
        """Shared memory of a block of both kernels: sums and rings of its warps, and activations."""
        up = sizes.warps * _of_warp(sizes.up_tiles, sizes.up_depth) + _ZEROS + 2 * problem.H
        down = problem.K * (_of_warp(sizes.down_tiles, sizes.down_depth) + _ZEROS + 2 * problem.I)
        return up, down

    def uses(self, plan: ColumnPlan[ColumnSizes], ids64: bool, add: bool) -> tuple[Use, ...]:
        problem, sizes = plan.problem, plan.sizes
        up, down = self.memory(problem, sizes)
        out = {"TOP_K": problem.K, "OUT32": problem.out_dtype == torch.float32, "ADD": add}
        of_up = {"WARPS": sizes.warps, "ROW_TILES": sizes.up_tiles, "DEPTH": sizes.up_depth}
        of_down = {"ROW_TILES": sizes.down_tiles, "DEPTH": sizes.down_depth}
        return (
            Use.of(plan.arch, "sm80/int4_24_few_gate_up", up, ID64=ids64, **of_up),
            Use.of(plan.arch, "sm80/int4_24_few_down", down, ID64=ids64, **out, **of_down),
        )

    def bind(self, plan: ColumnPlan[ColumnSizes], uses: tuple[Use, ...], device: int) -> tuple[Launch, ...]:
        (gate_up, down), problem, sizes = uses, plan.problem, plan.sizes
        T, E, K, H, I = problem.T, problem.E, problem.K, problem.H, problem.I
        rows = gate_up_rows(problem.gate_up_order, I)
        return (
            gate_up.bind(device, (ceil_div(I, 8 * sizes.up_tiles), T * K), 32 * sizes.warps, T * K, E, K, H, I, *rows),
            down.bind(device, (ceil_div(H, 16 * sizes.down_tiles), T), 32 * K, T * K, E, H, I),
        )


INT4_24_FEW = Int4_24Few()
