"""int4_24 experts on Hopper, few pairs without a sort: sm90/int4_24_few_gate_up.cu and sm90/int4_24_few_down.cu."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...contract import Problem
from ...sizes import ceil_div
from ..arch import Target
from ..jit.load import Launch
from .cuda_cpp import why_not_products
from .int4_24_few import ColumnPlan, FewInt4_24
from .uses import Use

_ENOUGH = 400 * 32  # channels of an H200's teams of warps, 32 each
_PAIR_OF_SLABS = 256  # bytes of activations in shared memory
_MULTIPROCESSORS = 132  # of an H100 and an H200


@dataclass(frozen=True)
class DirectSizes:
    """Sizes of both kernels: see their sources.

    Attributes:
        up_tiles: products of 16 rows a warp of the first kernel.
        down_eights: rows a block of the second kernel, times 8.
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
    down_eights: int = 4
    down_warps: int = 1
    down_ahead: int = 3
    down_blocks: int = 2

    @property
    def down_tiles(self) -> int:
        """Products of 16 rows a warp of the second kernel; an odd eight of rows takes a whole one."""
        return ceil_div(self.down_eights, 2)


def _column(channels: int, warps: int) -> int:
    """Bytes of shared memory."""
    pairs = ceil_div(channels, 128)
    return ceil_div(pairs, warps) * warps * _PAIR_OF_SLABS


def even_eights(problem: Problem) -> int | None:
    """Rows a block of the second kernel, times 8, that make one block for nearly every multiprocessor, or None."""
    blocks = {e: problem.H // (8 * e) * problem.T for e in range(2, 9) if problem.H % (8 * e) == 0}
    return min((e for e, n in blocks.items() if 0.8 * _MULTIPROCESSORS <= n <= _MULTIPROCESSORS), default=None)


class Sm90Int4_24Few(FewInt4_24[DirectSizes]):
    """See the module's docstring."""

    name = "int4_24_few_sm90"
    kernels = "CUDA C++ kernels of int4_24 words, few pairs, words straight to registers"

    def why_not(self, problem: Problem, target: Target) -> str | None:
        return super().why_not(problem, target) or why_not_products(target, "sm90")

    def memory(self, problem: Problem, sizes: DirectSizes) -> tuple[int, int]:
        """Shared memory of a block of both kernels: sums of its warps, and activations."""
        up = sizes.up_warps * sizes.teams * sizes.up_tiles * 64 + _column(problem.H, sizes.up_warps)
        down = problem.K * (sizes.down_warps * sizes.down_tiles * 64 + _column(problem.I, sizes.down_warps))
        return up, down

    def sizes(self, problem: Problem) -> DirectSizes:
        """Found on an H200. Products that share activations load them less often, and make fewer warps."""
        channels = problem.T * problem.K * problem.I  # of the first kernel's output
        up = {"up_tiles": 4, "up_ahead": 1} if channels >= _ENOUGH else {}
        eights = even_eights(problem)
        if eights is None or (eights > 2 and problem.K > 8):
            return DirectSizes(**up)
        if eights == 2:
            return DirectSizes(**up, down_eights=2, down_ahead=6)
        ahead = 2 if eights <= 4 else 1  # what the registers of 16 warps hold
        return DirectSizes(**up, down_eights=eights, down_warps=2, down_ahead=ahead, down_blocks=1)

    def uses(self, plan: ColumnPlan[DirectSizes], ids64: bool, add: bool) -> tuple[Use, ...]:
        problem, sizes = plan.problem, plan.sizes
        up, down = self.memory(problem, sizes)
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
            "EIGHTS": sizes.down_eights,
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

    def bind(self, plan: ColumnPlan[DirectSizes], uses: tuple[Use, ...], device: int) -> tuple[Launch, ...]:
        (gate_up, down), problem, sizes = uses, plan.problem, plan.sizes
        T, E, K, H, I = problem.T, problem.E, problem.K, problem.H, problem.I
        channels, threads = 8 * sizes.up_tiles * sizes.teams, 32 * sizes.up_warps * sizes.teams
        return (
            gate_up.bind(device, (ceil_div(I, channels), T * K), threads, T * K, E, K),
            down.bind(device, (H // (8 * sizes.down_eights), T), 32 * K * sizes.down_warps, T * K, E),
        )


INT4_24_FEW_SM90 = Sm90Int4_24Few()
