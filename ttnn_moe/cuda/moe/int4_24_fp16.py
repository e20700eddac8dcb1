"""What families of int4_24 products in fp16 share, which holds an int4 times its scale exactly: rows, and launches."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from ...contract import Problem
from ...formats.int4_24 import NAME
from ..arch import Target
from ..jit import load
from ..jit.load import Launch
from . import sort
from .cuda_cpp import launches_of, limits
from .family import Buffer, Call
from .sorted import Sorted, SortedPlan, TileT
from .uses import Use

_ROW_THREADS = 256


class SortedFp16(Sorted[TileT]):
    """Hidden in fp16, the sort, both grouped products in one launch, combine.

    Attributes:
        rows_kernel: what makes hidden in fp16, under gpu_kernels/cuda.
        least_rows: of an expert on average, which other kernels run as fast.
    """

    weight_format = NAME
    least_tile = 8
    rows_kernel: str
    least_rows: int

    @abstractmethod
    def channels(self, channels: int) -> int:
        """Channels of a row in scratch."""

    def why_not(self, problem: Problem, target: Target) -> str | None:
        reason = limits(problem, target, self.weight_format, (torch.bfloat16,))
        if reason is None and not problem.fp16_scales:
            reason = "it multiplies in fp16, and no one found out that fp16 holds the scales (Experts.int4_24 does)"
        if reason is None and problem.T * problem.K <= self.least_rows * problem.E:
            least, pairs = self.least_rows, problem.T * problem.K
            reason = f"it runs more than {least} rows an expert, not {pairs} on {problem.E}"
        return reason

    def prepares(self, plan: SortedPlan[TileT]) -> bool:
        return True

    def scratch(self, plan: SortedPlan[TileT]) -> tuple[Buffer, ...]:
        """Those of Sorted; hidden in fp16; powers of rows of hidden and of activations."""
        problem, (_, rows, words) = plan.problem, super().scratch(plan)
        P = problem.T * problem.K
        return (
            Buffer((P, self.channels(problem.I)), torch.int16),
            rows,
            words,
            Buffer((problem.T, self.channels(problem.H)), torch.float16),
            Buffer((problem.T,), torch.float32),
            Buffer((P,), torch.float32),
        )

    def uses(self, plan: SortedPlan[TileT], ids64: bool, add: bool) -> tuple[Use, ...]:
        rows = Use.of(plan.arch, self.rows_kernel, 4 * _ROW_THREADS // 32)
        return rows, *super().uses(plan, ids64, add)

    def bind(self, plan: SortedPlan[TileT], uses: tuple[Use, ...], device: int) -> tuple[Launch, ...]:
        rows, *others = uses
        bound = rows.bind(device, (plan.problem.T,), _ROW_THREADS, plan.problem.H)
        return bound, *super().bind(plan, tuple(others), device)

    def launch(self, plan: SortedPlan[TileT], call: Call, buffers: tuple[Tensor, ...]) -> None:
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
