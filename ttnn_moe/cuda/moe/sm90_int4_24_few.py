"""int4_24 experts on Hopper, few pairs without a sort: sm90/int4_24_few_gate_up.cu and sm90/int4_24_few_down.cu."""

from __future__ import annotations

from dataclasses import dataclass

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
from .uses import Use, pointer

MOST_PAIRS = 24
_ENOUGH = 400 * 32  # channels of an H200's teams of warps, 32 each
_PAIR_OF_SLABS = 256  # bytes of activations in shared memory


@dataclass(frozen=True)
class DirectSizes:
    """Sizes of both kernels: see their sources.

    Attributes:
        up_tiles, down_tiles: products of 16 rows a warp.
        up_warps, down_warps: that share the channels of a row.
        teams: of up_warps in a block of the first kernel.
        up_ahead, down_ahead: pairs of slabs of 64 channels that a warp has requested.
        up_blocks, down_blocks: least number of resident blocks that the compiler leaves registers for.
    """

    up_tiles: int = 2
    up_warps: int = 4
    teams: int = 2
    up_ahead: int = 2
    up_blocks: int = 2
    down_tiles: int = 2
    down_warps: int = 1
    down_ahead: int = 4
    down_blocks: int = 2


@dataclass(frozen=True, eq=False)
class DirectPlan:
    problem: Problem
    arch: Arch
    sizes: DirectSizes


def _column(channels: int, warps: int) -> int:
    """Bytes of shared memory."""
    pairs = ceil_div(channels, 128)
    return ceil_div(pairs, warps) * warps * _PAIR_OF_SLABS


class Sm90Int4_24Few(CudaCpp[DirectPlan]):
    """See the module's docstring. The least host time: two launches."""

    name = "int4_24_few_sm90"
    kernels = "CUDA C++ kernels of int4_24 words, few pairs, words straight to registers"
    weight_format = NAME
    rounds_expert_out = False

    def why_not(self, problem: Problem, target: Target) -> str | None:
        reason = limits(problem, target, self.weight_format, (torch.bfloat16,)) or why_not_few(problem, MOST_PAIRS)
        if reason is not None:
            return reason
        arch = arch_of(target)
        if arch.products != "sm90":
            return f"its code is for sm_90a, not {arch.name}"
        for name, room in zip("HI", self._memory(problem, self.sizes(problem)), strict=True):
            if room > arch.shared_memory:
                return f"{name} takes {room} bytes of shared memory, and {arch.name} has {arch.shared_memory}"
        return None

    @staticmethod
    def _memory(problem: Problem, sizes: DirectSizes) -> tuple[int, int]:
        """Shared memory of a block of both kernels: sums of its warps, and activations."""
        up = sizes.up_warps * sizes.teams * sizes.up_tiles * 64 + _column(problem.H, sizes.up_warps)
        down = problem.K * (sizes.down_warps * sizes.down_tiles * 64 + _column(problem.I, sizes.down_warps))
        return up, down

    def plan(self, problem: Problem, target: Target) -> DirectPlan:
        return DirectPlan(problem, arch_of(target), self.sizes(problem))

    @staticmethod
    def sizes(problem: Problem) -> DirectSizes:
        """Found on an H200. Products that share activations load them less often, and make fewer warps."""
        channels = problem.T * problem.K * problem.I  # of the first kernel's output
        return DirectSizes(up_tiles=4, up_ahead=1) if channels >= _ENOUGH else DirectSizes()

    def scratch(self, plan: DirectPlan) -> tuple[Buffer, ...]:
        problem = plan.problem
        return (Buffer((problem.T * problem.K, problem.I), problem.dtype),)

    def uses(self, plan: DirectPlan, ids64: bool, add: bool) -> tuple[Use, ...]:
        problem, sizes = plan.problem, plan.sizes
        up, down = self._memory(problem, sizes)
        common = {"ID64": ids64, "HIDDEN": problem.H, "INTER": problem.I}
        of_up = {
            "TILES": sizes.up_tiles,
            "WARPS": sizes.up_warps,
            "TEAMS": sizes.teams,
            "AHEAD": sizes.up_ahead,
            "BLOCKS": sizes.up_blocks,
            "INTERLEAVED": problem.gate_up_order == "interleaved",
        }
        of_down = {
            "TILES": sizes.down_tiles,
            "WARPS": sizes.down_warps,
            "AHEAD": sizes.down_ahead,
            "BLOCKS": sizes.down_blocks,
            "TOP_K": problem.K,
            "OUT32": problem.out_dtype == torch.float32,
            "ADD": add,
        }
        return (
            Use.of(plan.arch, "sm90/int4_24_few_gate_up", up, **common, **of_up),
            Use.of(plan.arch, "sm90/int4_24_few_down", down, **common, **of_down),
        )

    def bind(self, plan: DirectPlan, uses: tuple[Use, ...], device: int) -> tuple[Launch, ...]:
        (gate_up, down), problem, sizes = uses, plan.problem, plan.sizes
        T, E, K, H, I = problem.T, problem.E, problem.K, problem.H, problem.I
        channels, threads = 8 * sizes.up_tiles * sizes.teams, 32 * sizes.up_warps * sizes.teams
        return (
            gate_up.bind(device, (ceil_div(I, channels), T * K), threads, T * K, E, K),
            down.bind(device, (ceil_div(H, 16 * sizes.down_tiles), T), 32 * K * sizes.down_warps, T * K, E),
        )

    def launch(self, plan: DirectPlan, call: Call, buffers: tuple[Tensor, ...]) -> None:
        gate_up, down = launches_of(self, plan, call)
        hidden, routing = call.hidden, call.routing
        w13, w2 = (call.experts.tensors[name].data_ptr() for name in ("w13", "w2"))
        stream, act = load.stream(hidden.device.index), buffers[0].data_ptr()
        route = routing.topk_ids.data_ptr(), pointer(call.expert_map), pointer(routing.num_tokens)
        gate_up(stream, hidden.data_ptr(), w13, *route, act)
        down(stream, act, w2, *route, routing.topk_weights.data_ptr(), call.out.data_ptr())


INT4_24_FEW_SM90 = Sm90Int4_24Few()
