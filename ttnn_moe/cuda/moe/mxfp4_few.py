"""MXFP4 experts, few pairs without a sort: sm80/mxfp4_few_gate_up.cu and sm80/mxfp4_few_down.cu."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...activations import CLAMPED_SWIGLU
from ...contract import Problem
from ...formats.mxfp4 import GROUP, NAME
from ...formats.mxfp4_boxes import NAME as BOXES
from ...sizes import ceil_div
from ..arch import Arch, Target
from ..jit import load
from ..jit.load import Launch
from .cuda_cpp import CudaCpp, arch_of, launches_of, limits, why_not_products
from .family import Buffer, Call
from .mxfp4_activations import BF16, why_not_read
from .pairs import why_not_few
from .uses import Use, bias_pointers

MOST_PAIRS, MOST_TOKENS = 32, 4
MOST_BYTES = 150_000_000  # of the pairs' weights, where mxfp4_sm90 runs, too
CHUNK = 128  # channels that a warp multiplies together
ZEROS = 64  # bytes


@dataclass(frozen=True)
class ColumnSizes:
    """Sizes of both kernels: see their sources.

    Attributes:
        warps: of a block of the first kernel, which share the channels.
        split: warps that share a pair in the second kernel.
        up_tiles, down_tiles: products of 16 rows a warp, 1 or 2.
        up_unroll, down_unroll: chunks of 128 channels that a warp has requested.
    """

    warps: int = 4
    split: int = 2
    up_tiles: int = 1
    down_tiles: int = 1
    up_unroll: int = 2
    down_unroll: int = 3


@dataclass(frozen=True, eq=False)
class ColumnPlan:
    problem: Problem
    arch: Arch
    sizes: ColumnSizes


class Mxfp4Few(CudaCpp[ColumnPlan]):
    """See the module's docstring. The least host time: two launches."""

    name = "mxfp4_few"
    kernels = "CUDA C++ kernels of MXFP4 weights, few pairs"
    weight_format = NAME
    rounds_expert_out = False
    boxed = False

    def why_not(self, problem: Problem, target: Target) -> str | None:
        reason = mxfp4_limits(problem, target, self.weight_format) or why_not_few(problem, MOST_PAIRS)
        if reason is not None:
            return reason
        if problem.T > MOST_TOKENS:
            return f"it runs up to {MOST_TOKENS} tokens"
        arch = arch_of(target)
        size = problem.T * problem.K * 3 * problem.H * problem.I * 17 // 32
        if arch.products == "sm90" and problem.T > 1 and size > MOST_BYTES:
            return f"it runs pairs of up to {MOST_BYTES} bytes of weights, not {size}"
        for name, room in zip("HI", self._memory(problem, self._sizes(problem)), strict=True):
            if room > arch.shared_memory:
                return f"{name} takes {room} bytes of shared memory, and {arch.name} has {arch.shared_memory}"
        return None

    @staticmethod
    def _sizes(problem: Problem) -> ColumnSizes:
        """Found on an H200, for gpt-oss-120b and Qwen3-30B-A3B."""
        if problem.T == 1:
            # eight warps where each then requests all its channels at once
            warps = 8 if problem.H <= 8 * ColumnSizes.up_unroll * CHUNK else 4
            split = 2 if problem.K <= 8 else 1
            return ColumnSizes(warps, split, down_unroll=min(4, ceil_div(problem.I, split * CHUNK)))
        if problem.T == 2:
            split = max(1, 8 // problem.K)
            return ColumnSizes(split=split, down_unroll=3 if problem.I <= 6 * split * CHUNK else 2)
        return ColumnSizes(split=max(1, 8 // problem.K), up_tiles=2, down_tiles=2, down_unroll=2)

    @staticmethod
    def _memory(problem: Problem, sizes: ColumnSizes) -> tuple[int, int]:
        """Shared memory of a block of both kernels: sums of its warps, activations, scales."""

        def of(warps: int, tiles: int, pairs: int, channels: int) -> int:
            each = ceil_div(channels, CHUNK) * 2 * CHUNK + 16 * tiles * channels // GROUP
            return warps * tiles * 64 + ZEROS + pairs * each

        up = of(sizes.warps, sizes.up_tiles, 1, problem.H)
        return up, of(problem.K * sizes.split, sizes.down_tiles, problem.K, problem.I)

    def plan(self, problem: Problem, target: Target) -> ColumnPlan:
        return ColumnPlan(problem, arch_of(target), self._sizes(problem))

    def scratch(self, plan: ColumnPlan) -> tuple[Buffer, ...]:
        problem = plan.problem
        return (Buffer((problem.T * problem.K, problem.I), problem.dtype),)

    def uses(self, plan: ColumnPlan, ids64: bool, add: bool) -> tuple[Use, ...]:
        problem, sizes = plan.problem, plan.sizes
        up, down = self._memory(problem, sizes)
        out = {"TOP_K": problem.K, "OUT32": problem.out_dtype == torch.float32, "ADD": add, "SPLIT": sizes.split}
        of = {"HIDDEN": problem.H, "INNER": problem.I, "BOXED": self.boxed}
        of_up = of | {"WARPS": sizes.warps, "ROW_TILES": sizes.up_tiles, "UNROLL": sizes.up_unroll, "TOP_K": problem.K}
        of_up |= activation_defines(problem) | {"INTERLEAVED": problem.gate_up_order == "interleaved"}
        of_down = of | {"ROW_TILES": sizes.down_tiles, "UNROLL": sizes.down_unroll, "BIASED": problem.biased}
        return (
            Use.of(plan.arch, "sm80/mxfp4_few_gate_up", up, ID64=ids64, **of_up),
            Use.of(plan.arch, "sm80/mxfp4_few_down", down, ID64=ids64, **out, **of_down),
        )

    def bind(self, plan: ColumnPlan, uses: tuple[Use, ...], device: int) -> tuple[Launch, ...]:
        (gate_up, down), problem, sizes = uses, plan.problem, plan.sizes
        T, E, K, H, I = problem.T, problem.E, problem.K, problem.H, problem.I
        fragments = ceil_div(I, CHUNK) * 16 if self.boxed else I // 8
        up_grid, down_grid = (T * K, fragments // sizes.up_tiles), (T, H // (16 * sizes.down_tiles))
        return (
            gate_up.bind(device, up_grid, 32 * sizes.warps, T * K, E),
            down.bind(device, down_grid, 32 * K * sizes.split, T * K, E),
        )

    def launch(self, plan: ColumnPlan, call: Call, buffers: tuple[Tensor, ...]) -> None:
        gate_up, down = launches_of(self, plan, call)
        hidden, routing, weights = call.hidden, call.routing, weight_pointers(call)
        stream, act = load.stream(hidden.device.index), buffers[0].data_ptr()
        route = call.route
        gate_up(stream, hidden.data_ptr(), *weights[:4], *route, act)
        down(stream, act, *weights[4:], *route, routing.topk_weights.data_ptr(), call.out.data_ptr())


class Mxfp4FewBoxes(Mxfp4Few):
    """The same of arranged weights."""

    name = "mxfp4_few_boxes"
    kernels = "CUDA C++ kernels of arranged MXFP4 weights, few pairs"
    weight_format = BOXES
    boxed = True

    def why_not(self, problem: Problem, target: Target) -> str | None:
        # more pairs run on Hopper alone, and a loader that asked for few of them would arrange experts elsewhere
        return super().why_not(problem, target) or why_not_products(target, "sm90")


def mxfp4_limits(problem: Problem, target: Target, weight_format: str = NAME) -> str | None:
    """Why the kernels of MXFP4 weights that multiply bf16 do not run a problem, or None."""
    reason = limits(problem, target, weight_format, (torch.bfloat16,), multiple=GROUP, silu_only=False)
    return reason or why_not_read(BF16)


def activation_defines(problem: Problem) -> dict[str, bool]:
    """Those of common/activation.cuh."""
    return {"CLAMPED": problem.activation == CLAMPED_SWIGLU, "BIASED": problem.biased}


def weight_pointers(call: Call) -> tuple[int, ...]:
    """Blocks, scales, and biases as bf16 and as fp32: of gate and up, then of down."""
    tensors = call.experts.tensors
    addresses: list[int] = []
    for name in ("gate_up", "down"):
        blocks, scales, bias = tensors[f"{name}_blocks"], tensors[f"{name}_scales"], tensors.get(f"{name}_bias")
        addresses += blocks.data_ptr(), scales.data_ptr(), *bias_pointers(bias)
    return tuple(addresses)


MXFP4_FEW = Mxfp4Few()
MXFP4_FEW_BOXES = Mxfp4FewBoxes()
