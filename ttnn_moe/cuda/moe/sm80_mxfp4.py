"""MXFP4 experts on sm_80 and newer: both products in one launch of sm80/mxfp4_narrow.cu."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from ...contract import Problem
from ...formats.mxfp4 import NAME
from ..arch import Arch, Target
from ..device import gpu
from ..jit import load
from ..jit.load import Launch
from . import sort
from .cuda_cpp import launches_of
from .family import Call
from .mxfp4_few import activation_defines, gate_up_rows, mxfp4_limits, weight_pointers
from .pairs import rows_an_expert
from .sorted import Sorted, SortedPlan
from .uses import Use, pointer

ITEMS = 5 * 32  # bytes of claimed items, and of what they have in common


@dataclass(frozen=True)
class NarrowTile:
    """Sizes of mxfp4_narrow.cu.

    Attributes:
        warps, max_n: warps of a block, which share the channels; rows of a tile at most.
        depth: chunks of 128 channels in a warp's ring. blocks: resident blocks a multiprocessor, at least.
    """

    warps: int
    max_n: int
    depth: int
    blocks: int

    granule = 4
    read_once = True

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_memory(self) -> int:
        """Without scales."""
        return self.warps * (self.depth * (4096 + 256 * self.max_n) + self.max_n * 272) + ITEMS

    def memory(self, problem: Problem) -> int:
        return self.shared_memory + 4 * max(problem.H, problem.I)


class Sm80Mxfp4(Sorted[NarrowTile]):
    """See the module's docstring."""

    name = "mxfp4"
    kernels = "CUDA C++ kernels of MXFP4 weights"
    weight_format = NAME
    least_tile = 4

    def why_not(self, problem: Problem, target: Target) -> str | None:
        return mxfp4_limits(problem, target)

    def kernel(self, tile: NarrowTile) -> str:
        return "sm80/mxfp4_narrow"

    def tile(self, problem: Problem, arch: Arch) -> NarrowTile:
        return NarrowTile(4, 8, 2, 3) if rows_an_expert(problem) <= 5 else NarrowTile(4, 16, 2, 2)

    def uses(self, plan: SortedPlan[NarrowTile], ids64: bool, add: bool) -> tuple[Use, ...]:
        *sorts, product, combine = super().uses(plan, ids64, add)
        problem = plan.problem
        of = plan.product(self.kernel(plan.tile), **activation_defines(problem))
        product = replace(of, shared_memory=plan.tile.memory(problem))
        return *sorts, product, combine

    def bind_product(self, plan: SortedPlan[NarrowTile], use: Use, device: int) -> Launch:
        problem, threads = plan.problem, plan.tile.threads
        # no more than the architecture's own multiprocessors hold, which keep 1 KiB a block
        most = ((plan.arch.shared_memory + 1024) // (use.shared_memory + 1024)) * gpu(device).multiprocessors
        blocks = min(load.resident_blocks(use.spec, device, threads, use.shared_memory), most)
        return use.bind(device, (blocks,), threads, problem.H, problem.I, *gate_up_rows(problem))

    def launch(self, plan: SortedPlan[NarrowTile], call: Call, buffers: tuple[Tensor, ...]) -> None:
        (*sorts, product, combine), routing, words = launches_of(self, plan, call), call.routing, plan.words
        act, rows, at = (buffer.data_ptr() for buffer in buffers)
        stream, bound = load.stream(call.hidden.device.index), pointer(routing.num_tokens)
        sort.launch_sorts(sorts, stream, (routing.topk_ids.data_ptr(), pointer(call.expert_map), bound), at, words)
        routed = at, at + words.tiles, at + words.num_tiles
        product(stream, *weight_pointers(call), call.hidden.data_ptr(), *routed, act, rows)
        combine(stream, rows, at + words.inverse, routing.topk_weights.data_ptr(), bound, call.out.data_ptr())


MXFP4 = Sm80Mxfp4()
