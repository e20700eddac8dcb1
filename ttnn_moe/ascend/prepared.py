"""A layer made ready: weights laid out. The operators allocate what they return, from torch_npu's caching allocator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..contract import Experts, Placement, Problem, Routing, check_prepared
from . import kernels, run
from .layout import Weights, weights_of


class PreparedAscend:
    """See ttnn_moe.prepare. With a placement and no rank, one NPU runs the D devices one after the other."""

    def __init__(self, npu: Any, problem: Problem, experts: Experts, placement: Placement | None):
        self.problem, self._npu, self._placement = problem, npu, placement
        whole = placement is not None and placement.rank is None
        held = (
            [experts.for_device(placement, d) for d in range(placement.D)]
            if placement is not None and whole
            else [experts]
        )
        # kept beside the weights: layouts live as long as their experts
        self._parts: list[tuple[Experts, Weights]] = [(part, weights_of(part)) for part in held]

    def __call__(
        self,
        hidden: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
        num_tokens: Tensor | None = None,
    ) -> Tensor:
        problem, placement = self.problem, self._placement
        routing = Routing.from_topk(topk_ids, topk_weights, problem.E, placement=placement, num_tokens=num_tokens)
        check_prepared(problem, hidden, routing, out, accumulate)
        if out is None:
            out = hidden.new_empty(routing.T, problem.H, dtype=problem.out_dtype)
        npu, hidden = self._npu, hidden.contiguous()
        layer = kernels.moe if kernels.asked_for() else run.moe
        if len(self._parts) == 1:
            local = routing if placement is None else routing.for_device()
            layer(npu, hidden, local, self._parts[0][1], out, accumulate)
            return out
        sums = out.new_zeros(out.shape, dtype=torch.float32)
        for d, (_, weights) in enumerate(self._parts):
            layer(npu, hidden, routing.for_device(d), weights, sums, d > 0)
        run.write(sums, out, accumulate, num_tokens)
        return out
