"""What families of grouped int4_24 products share: hidden in the order of channels that they take, and launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...contract import Problem
from ...formats.int4_24 import GROUP, NAME
from ...sizes import ceil_div
from ..arch import Target
from ..jit import load
from ..jit.load import Launch
from . import sort
from .cuda_cpp import launches_of, limits
from .family import Buffer, Call
from .sorted import Sorted, SortedPlan, TileT
from .uses import Use

ORDER_THREADS = 128


class SortedInt4_24(Sorted[TileT]):
    """Sort, hidden in the order of channels, both grouped products in one launch, combine."""

    weight_format = NAME
    least_tile = 8

    def why_not(self, problem: Problem, target: Target) -> str | None:
        return limits(problem, target, self.weight_format, (torch.bfloat16,))

    def prepares(self, plan: SortedPlan[TileT]) -> bool:
        """Whether the products take channels in the order of int4_24_order, not in their own."""
        return True

    def scratch(self, plan: SortedPlan[TileT]) -> tuple[Buffer, ...]:
        """Those of Sorted, and the rows of hidden in the order of channels that the products take."""
        problem, buffers = plan.problem, super().scratch(plan)
        return (*buffers, Buffer((problem.T, problem.H), problem.dtype)) if self.prepares(plan) else buffers

    def uses(self, plan: SortedPlan[TileT], ids64: bool, add: bool) -> tuple[Use, ...]:
        uses = super().uses(plan, ids64, add)
        return (Use.of(plan.arch, "sm80/int4_24_order"), *uses) if self.prepares(plan) else uses

    def bind(self, plan: SortedPlan[TileT], uses: tuple[Use, ...], device: int) -> tuple[Launch, ...]:
        if not self.prepares(plan):
            return super().bind(plan, uses, device)
        order, *others = uses
        groups = plan.problem.T * plan.problem.H // GROUP
        ordered = order.bind(device, (ceil_div(groups, ORDER_THREADS),), ORDER_THREADS, groups)
        return ordered, *super().bind(plan, tuple(others), device)

    def launch(self, plan: SortedPlan[TileT], call: Call, buffers: tuple[Tensor, ...]) -> None:
        (*sorts, product, combine), routing, words = launches_of(self, plan, call), call.routing, plan.words
        act, rows, at, *ordered = (buffer.data_ptr() for buffer in buffers)
        w13, w2 = (call.experts.tensors[name].data_ptr() for name in ("w13", "w2"))
        stream: Any = load.stream(call.hidden.device.index)
        route, hidden = call.route, call.hidden.data_ptr()
        if ordered:
            sorts.pop(0)(stream, hidden, ordered[0])
            hidden = ordered[0]
        sort.launch_sorts(sorts, stream, route, at, words)
        product(stream, w13, w2, hidden, at, at + words.tiles, at + words.num_tiles, act, rows)
        combine(stream, rows, at + words.inverse, routing.topk_weights.data_ptr(), route[2], call.out.data_ptr())
