"""A layer made ready: weights loaded, programs planned, for the largest call."""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract import Experts, Placement, Problem, Routing, check_prepared
from ..errors import ContractError
from .backend import loaded, run
from .operators import Sizes, operators


class PreparedTenstorrent:
    """See ttnn_moe.prepare. With a placement of D > 1 devices and no rank, it opens a 1xD mesh."""

    def __init__(self, problem: Problem, experts: Experts, placement: Placement | None):
        if placement is not None and placement.rank is not None and placement.D > 1:
            raise ContractError(
                "one process drives the whole mesh", got=f"a placement with rank {placement.rank}", expected="rank=None"
            )
        self.problem = problem
        self._experts = loaded(experts, placement)
        operators(self._experts.device, Sizes.of_experts(self._experts, problem.K))

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
        routing = Routing.from_topk(topk_ids, topk_weights, self.problem.E, num_tokens=num_tokens)
        check_prepared(self.problem, hidden, routing, out, accumulate)
        if out is None:
            out = torch.empty(routing.T, self.problem.H, dtype=self.problem.out_dtype)
        if routing.T:
            run(hidden.contiguous(), routing, self._experts, out, accumulate)
        return out
