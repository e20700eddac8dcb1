"""Few pairs without a sort: common/few_gate_up.cu and common/few_down.cu, on every architecture."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...contract import Problem
from ...sizes import ceil_div
from ..arch import Arch, Target
from ..jit import load
from ..jit.load import Launch
from .cuda_cpp import CudaCpp, arch_of, dense_limits, launches_of
from .family import Buffer, Call
from .pairs import why_not_few
from .uses import Use, halves, row_steps

# T = 3 of Qwen3-30B-A3B
MOST_PAIRS = 24


@dataclass(frozen=True)
class FewSizes:
    """Template sizes of both kernels: see their sources. Found on an H100 and an H200."""

    warps: int = 4
    channels: int = 1
    unroll: int = 2
    columns: int = 4
    prefetch: int = 2


@dataclass(frozen=True, eq=False)
class FewPlan:
    """Kernels and sizes of a problem of few pairs."""

    problem: Problem
    arch: Arch
    sizes: FewSizes


class Few(CudaCpp[FewPlan]):
    """See the module's docstring. The least host time: two launches."""

    name = "few"
    kernels = "CUDA C++ kernels of few pairs"
    rounds_expert_out = False

    def why_not(self, problem: Problem, target: Target) -> str | None:
        return dense_limits(problem, target) or why_not_few(problem, MOST_PAIRS)

    def plan(self, problem: Problem, target: Target) -> FewPlan:
        return FewPlan(problem, arch_of(target), FewSizes())

    def scratch(self, plan: FewPlan) -> tuple[Buffer, ...]:
        problem = plan.problem
        return (Buffer((problem.T * problem.K, problem.I), problem.dtype),)

    def uses(self, plan: FewPlan, ids64: bool, add: bool) -> tuple[Use, ...]:
        problem, sizes = plan.problem, plan.sizes
        ids = {"FP16": problem.dtype == torch.float16, "ID64": ids64}
        out = {"TOP_K": problem.K, "OUT32": problem.out_dtype == torch.float32, "ADD": add}
        up = {"WARPS": sizes.warps, "CHANNELS": sizes.channels, "UNROLL": sizes.unroll}
        down = {"COLUMNS": sizes.columns, "PREFETCH": sizes.prefetch}
        gate_up = Use.of(plan.arch, "common/few_gate_up", **ids, **up)
        return (
            replace(gate_up, carveout=load.HALF) if plan.arch.products == "sm90" else gate_up,
            Use.of(plan.arch, "common/few_down", **ids, **out, **down),
        )

    def bind(self, plan: FewPlan, uses: tuple[Use, ...], device: int) -> tuple[Launch, ...]:
        (gate_up, down), problem, sizes = uses, plan.problem, plan.sizes
        T, E, K, H, I = problem.T, problem.E, problem.K, problem.H, problem.I
        steps = row_steps(problem.gate_up_order, H, I)
        grid = ceil_div(I, sizes.warps * sizes.channels), T * K
        return (
            gate_up.bind(device, grid, 32 * sizes.warps, T * K, E, K, H, I, *steps),
            down.bind(device, (ceil_div(H, sizes.columns), T), 32 * K, T * K, E, H, I),
        )

    def launch(self, plan: FewPlan, call: Call, buffers: tuple[Tensor, ...]) -> None:
        gate_up, down = launches_of(self, plan, call)
        hidden, routing, experts = call.hidden, call.routing, call.experts
        stream, act = load.stream(hidden.device.index), buffers[0].data_ptr()
        route = call.route
        gate_up(stream, hidden.data_ptr(), *halves(experts), *route, act)
        weights = routing.topk_weights.data_ptr()
        down(stream, act, experts.tensors["down"].data_ptr(), *route, weights, call.out.data_ptr())


FEW = Few()
