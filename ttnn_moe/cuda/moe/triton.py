"""The Triton kernels: every size and GPU, in two forms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...contract import Problem
from ..arch import Target
from . import triton_launch
from .family import Buffer, Call
from .pairs import local_experts, why_not_few
from .triton_tiles import MOST_PAIRS, FewTiles, SortedTiles, few_tiles, sorted_tiles

MAX_E, MAX_K = 4096, 128
MOST_CHUNKS = (1 << 16) - 1
"""Of the sort: they are a grid's blocks in y."""


def _limits(problem: Problem) -> str | None:
    if problem.weight_format != "dense":
        return f"it runs dense weights, not {problem.weight_format!r}"
    if (reason := problem.beyond_silu()) is not None:
        return reason
    if problem.E > MAX_E or problem.K > MAX_K:
        return f"it runs up to {MAX_E} experts and K up to {MAX_K}, not E={problem.E}, K={problem.K}"
    return None


@dataclass(frozen=True, eq=False)
class TritonFewPlan:
    """Tiles of a problem of few pairs."""

    problem: Problem
    tiles: FewTiles


@dataclass(frozen=True, eq=False)
class TritonPlan:
    """Tiles of a problem whose pairs are sorted."""

    problem: Problem
    tiles: SortedTiles


class TritonFew:
    """Few pairs without a sort, in two launches."""

    name = "triton_few"
    kernels = "Triton kernels of few pairs"
    weight_format = "dense"
    alignment = 1
    rounds_expert_out = False
    operands: str | None = None

    def why_not(self, problem: Problem, target: Target) -> str | None:
        return _limits(problem) or why_not_few(problem, MOST_PAIRS)

    def plan(self, problem: Problem, target: Target) -> TritonFewPlan:
        return TritonFewPlan(problem, few_tiles(problem))

    def scratch(self, plan: TritonFewPlan) -> tuple[Buffer, ...]:
        problem = plan.problem
        return (Buffer((problem.T * problem.K, problem.I), problem.dtype),)

    def launch(self, plan: TritonFewPlan, call: Call, buffers: tuple[Tensor, ...]) -> None:
        triton_launch.few(call, buffers[0], plan.tiles)


class Triton:
    """Sort, two grouped products, combine: four launches, five where the sort has several chunks."""

    name = "triton"
    kernels = "Triton kernels"
    weight_format = "dense"
    alignment = 1
    rounds_expert_out = True
    operands: str | None = None

    def why_not(self, problem: Problem, target: Target) -> str | None:
        if (reason := _limits(problem)) is not None:
            return reason
        most = MOST_CHUNKS * sorted_tiles(problem, target.gpu).sort_chunk
        return None if problem.T * problem.K <= most else f"it sorts up to {most} pairs (T * K)"

    def plan(self, problem: Problem, target: Target) -> TritonPlan:
        return TritonPlan(problem, sorted_tiles(problem, target.gpu))

    def scratch(self, plan: TritonPlan) -> tuple[Buffer, ...]:
        problem = plan.problem
        P, dtype = problem.T * problem.K, problem.dtype
        words = triton_launch.sort_words(P, local_experts(problem), plan.tiles)
        return Buffer((P, problem.I), dtype), Buffer((P, problem.H), dtype), Buffer((words,), torch.int32)

    def launch(self, plan: TritonPlan, call: Call, buffers: tuple[Tensor, ...]) -> None:
        act, expert_out, words = buffers
        hidden, routing, experts, tiles = call.hidden, call.routing, call.experts, plan.tiles
        rows = triton_launch.sort(routing, call.expert_map, experts.E, tiles, words)
        triton_launch.gate_up(hidden, experts, rows, act, tiles.m, tiles.gate_up)
        triton_launch.down(act, experts, rows, expert_out, tiles.m, tiles.down)
        weights, bound = routing.topk_weights, routing.num_tokens
        triton_launch.combine(expert_out, rows.inverse, weights, bound, call.out, call.accumulate, tiles.combine_h)


TRITON_FEW, TRITON = TritonFew(), Triton()
