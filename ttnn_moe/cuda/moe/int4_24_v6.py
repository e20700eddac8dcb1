"""int4_24 experts in the form of v6: permute, K2 (W13 and SwiGLU), K4 (W2), combine.

Both products (gpu_kernels/cuda/sm80/int4_24_v6) keep all channels of eight tokens in shared memory, and multiply by
mma.sp. Grids follow from T alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...contract import Problem
from ...formats.int4_24 import NAME
from ...sizes import ceil_div
from ..arch import Arch, Target
from ..jit import load
from ..jit.load import Launch
from . import sort
from .cuda_cpp import CudaCpp, arch_of, launches_of, limits
from .family import Buffer, Call
from .pairs import local_experts
from .sort import Sorters, Words
from .uses import Use, gate_up_rows

FOLDER = "sm80/int4_24_v6"
NTOK, OTILE, THREADS = 8, 128, 128
CHANNEL_BYTES = 2 * NTOK  # of shared memory: a channel of a block's tokens


@dataclass(frozen=True, eq=False)
class V6Plan:
    """Sort, permute, K2, K4, combine.

    Attributes:
        ahead: steps of 64 channels whose words a lane has requested before it needs them.
    """

    problem: Problem
    arch: Arch
    sorters: Sorters
    ahead: int = 4

    @property
    def most_rows(self) -> int:
        """Rows of X_perm at most: M."""
        return self.problem.T * self.problem.K

    @property
    def active(self) -> int:
        """Experts with a row, at most: U."""
        return min(local_experts(self.problem), self.most_rows)

    @cached_property
    def words(self) -> Words:
        """Of a sort with one tile for each expert that has a row."""
        return Words.of(self.most_rows, local_experts(self.problem), self.most_rows, self.sorters.parts)

    def bind_k2(self, use: Use, device: int, experts: int) -> Launch:
        """experts: blocks in y. An expert with more than T rows has several tiles a block."""
        H, I = self.problem.H, self.problem.I
        rows = gate_up_rows(self.problem.gate_up_order, I)
        return use.bind(device, (self._tiles, experts, ceil_div(I, OTILE)), THREADS, H, I, *rows)

    def bind_k4(self, use: Use, device: int, experts: int) -> Launch:
        """experts: blocks in y."""
        H, I = self.problem.H, self.problem.I
        return use.bind(device, (self._tiles, experts, ceil_div(H, OTILE)), THREADS, H, I)

    @property
    def _tiles(self) -> int:
        return ceil_div(self.problem.T, NTOK)


class Int4_24V6(CudaCpp[V6Plan]):
    """See the module's docstring."""

    name = "int4_24_v6"
    kernels = "CUDA C++ kernels of int4_24 words, v6"
    weight_format = NAME
    rounds_expert_out = True

    def why_not(self, problem: Problem, target: Target) -> str | None:
        if (reason := limits(problem, target, self.weight_format, (torch.bfloat16,))) is not None:
            return reason
        arch = arch_of(target)
        for name, channels in (("H", problem.H), ("I", problem.I)):
            if channels * CHANNEL_BYTES > arch.shared_memory:
                return (
                    f"a block holds {NTOK} tokens of {name}={channels} in shared memory, {channels * CHANNEL_BYTES} "
                    f"bytes, and {arch.name} gives it {arch.shared_memory}"
                )
        return None

    def plan(self, problem: Problem, target: Target) -> V6Plan:
        arch = arch_of(target)
        return V6Plan(problem, arch, sort.choose(problem, arch))

    def scratch(self, plan: V6Plan) -> tuple[Buffer, ...]:
        """X_perm, later Y_perm; X2_perm; words of the sort; OffE and Eids."""
        problem, M = plan.problem, plan.most_rows
        return (
            Buffer((M, problem.H), problem.dtype),
            Buffer((M, problem.I), problem.dtype),
            Buffer((plan.words.count,), torch.int32),
            Buffer((local_experts(problem) + 1 + plan.active,), torch.int32),
        )

    def uses(self, plan: V6Plan, ids64: bool, add: bool) -> tuple[Use, ...]:
        problem, arch = plan.problem, plan.arch
        out = {"FP16": False, "TOP_K": problem.K, "ADD": add, "OUT32": problem.out_dtype == torch.float32}
        return (
            *sort.sort_uses(arch, plan.sorters, local_experts(problem), ids64, NTOK),
            Use.of(arch, f"{FOLDER}/permute"),
            Use.of(arch, f"{FOLDER}/k2_w13", problem.H * CHANNEL_BYTES, WORDS_AHEAD=plan.ahead),
            Use.of(arch, f"{FOLDER}/k4_w2", problem.I * CHANNEL_BYTES, WORDS_AHEAD=plan.ahead),
            Use.of(arch, "common/combine", **out, DISCARD=False),
        )

    def bind(self, plan: V6Plan, uses: tuple[Use, ...], device: int) -> tuple[Launch, ...]:
        problem, (*sorts, permute, k2, k4, combine) = plan.problem, uses
        M, E, H, U = plan.most_rows, local_experts(problem), problem.H, plan.active
        return (
            *sort.bind_sorts(tuple(sorts), plan.sorters, device, M, problem.E, E, problem.K, M),
            permute.bind(device, (1 + M,), THREADS, H, E, U),
            plan.bind_k2(k2, device, U),
            plan.bind_k4(k4, device, U),
            sort.bind_combine(combine, device, problem.T, H),
        )

    def launch(self, plan: V6Plan, call: Call, buffers: tuple[Tensor, ...]) -> None:
        (*sorts, permute, k2, k4, combine), routing, words = launches_of(self, plan, call), call.routing, plan.words
        rows, act, at, OffE = (buffer.data_ptr() for buffer in buffers)
        Eids = OffE + 4 * (local_experts(plan.problem) + 1)
        stream, route = load.stream(call.hidden.device.index), call.route
        w13, w2 = (call.experts.tensors[name].data_ptr() for name in ("w13", "w2"))
        sort.launch_sorts(sorts, stream, route, at, words)
        permute(stream, call.hidden.data_ptr(), at, at + words.tiles, at + words.num_tiles, rows, OffE, Eids)
        k2(stream, rows, OffE, Eids, w13, act)
        k4(stream, act, OffE, Eids, w2, rows)
        combine(stream, rows, at + words.inverse, routing.topk_weights.data_ptr(), route[2], call.out.data_ptr())


INT4_24_V6 = Int4_24V6()
