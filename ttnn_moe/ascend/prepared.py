"""A layer made ready: weights laid out. The operators allocate what they return, from torch_npu's caching allocator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backend import Prepared, store
from ..contract import Experts, Placement, Problem, Routing
from . import kernels, run
from .layout import Weights, weights_of


class PreparedAscend(Prepared):
    """See ttnn_moe.prepare. With a placement and no rank, one NPU runs the D devices one after the other."""

    def __init__(self, npu: Any, problem: Problem, experts: Experts, placement: Placement | None):
        super().__init__(problem, experts, placement)
        self._npu = npu
        held = [experts]
        if placement is not None and placement.rank is None:
            held = [experts.for_device(placement, d) for d in range(placement.D)]
        # kept beside the weights: layouts live as long as their experts
        self._parts: list[tuple[Experts, Weights]] = [(part, weights_of(part)) for part in held]

    def _run(self, hidden: Tensor, routing: Routing, out: Tensor, accumulate: bool) -> None:
        layer = kernels.moe if kernels.asked_for() else run.moe
        if len(self._parts) == 1:
            local = routing if self.placement is None else routing.for_device()
            layer(self._npu, hidden, local, self._parts[0][1], out, accumulate)
            return
        sums = out.new_zeros(out.shape, dtype=torch.float32)
        for d, (_, weights) in enumerate(self._parts):
            layer(self._npu, hidden, routing.for_device(d), weights, sums, d > 0)
        store(sums, out, accumulate, routing.num_tokens)
