"""A layer made ready: weights laid out. The operators allocate what they return, from torch_npu's caching allocator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backend import Prepared, store
from ..contract import Experts, Placement, Problem, Routing
from . import path
from .layout import Weights


class PreparedAscend(Prepared):
    """See ttnn_moe.prepare. With a placement and no rank, one NPU runs the D devices one after the other."""

    def __init__(self, npu: Any, problem: Problem, experts: Experts, placement: Placement | None):
        super().__init__(problem, experts, placement)
        self._npu = npu
        held = [experts]
        if placement is not None and placement.rank is None:
            held = [experts.for_device(placement, d) for d in range(placement.D)]
        # kept beside the weights: layouts live as long as their experts
        self._parts: list[tuple[Experts, Weights]] = [(part, path.weights(npu, part)) for part in held]
        if placement is not None:
            for d in range(placement.D) if placement.rank is None else (placement.rank,):
                placement.local_table(d, self.device)

    def _run(self, hidden: Tensor, routing: Routing, out: Tensor, accumulate: bool) -> None:
        total = self._result(hidden, routing, accumulate or out.dtype != hidden.dtype)
        store(total, out, accumulate, routing.num_tokens)

    def _new(self, hidden: Tensor, routing: Routing) -> Tensor:
        return self._result(hidden, routing, self.problem.out_dtype != hidden.dtype)

    def _result(self, hidden: Tensor, routing: Routing, wide: bool) -> Tensor:
        if len(self._parts) == 1:
            local = routing if self.placement is None else routing.for_device()
            return path.result(self._npu, hidden, local, self._parts[0][1], wide)
        sums = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        for d, (_, weights) in enumerate(self._parts):
            sums += path.result(self._npu, hidden, routing.for_device(d), weights, True)
        return sums if wide else sums.to(hidden.dtype)
