"""A layer made ready for calls of up to problem.T tokens: weights are loaded, programs are planned."""

from __future__ import annotations

from torch import Tensor

from ..backend import Prepared
from ..contract import Experts, Placement, Problem, Routing
from ..errors import ContractError
from .host import loaded, run
from .programs import Sizes, programs_of


class PreparedTenstorrent(Prepared):
    """See ttnn_moe.prepare. With a placement of D > 1 devices and no rank, it opens a 1xD mesh."""

    def __init__(self, problem: Problem, experts: Experts, placement: Placement | None):
        if placement is not None and placement.rank is not None and placement.D > 1:
            raise ContractError(
                "one process drives the whole mesh", got=f"a placement with rank {placement.rank}", expected="rank=None"
            )
        self.problem = problem
        self._experts = loaded(experts, placement)
        programs_of(self._experts.device, Sizes.of_experts(self._experts, problem.K))

    def _run(self, hidden: Tensor, routing: Routing, out: Tensor, accumulate: bool) -> None:
        if routing.T:
            run(hidden, routing, self._experts, out, accumulate)
