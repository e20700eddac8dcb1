"""One layer whose experts are spread over processes: dispatch, run the local experts, combine."""

from __future__ import annotations

import torch
import torch.distributed as dist
from loguru import logger
from torch import Tensor

from .. import api, registry
from ..contract import Experts, Placement, Problem, Routing, check_prepared
from ..errors import BackendUnavailable, ContractError
from .exchange import AllToAll, Exchange

EXCHANGES = ("auto", "dispatch_combine", "all_to_all")


class ExpertParallel:
    """op(hidden [T, H], topk_ids [T, K], topk_weights [T, K]) -> out [T, H], the sum over all processes' experts.

    Every process of the group makes one, with its own experts, and all call it together, also those with no token.

    Args:
        problem: as for ttnn_moe.prepare; T bounds the tokens of every process, E counts all experts.
        experts: the E/D of this process, in the order of placement.device_expert_mapping[rank].
        placement: with rank set; D is the size of the group.
        group: of torch.distributed; default: all processes.
        backend: runs the local experts.
        exchange: "all_to_all"; "dispatch_combine" (torch_npu's npu_moe_distribute_*_v2); "auto": that if the sizes,
            this torch_npu and HCCL_BUFFSIZE allow it, else all_to_all.
        wire: dtype in which all_to_all sends results back: fp32, or the dtype of hidden (one rounding a process).

    Raises:
        ContractError: experts, placement, group and problem do not fit. BackendUnavailable: the exchange asked for
            cannot run; HCCL_BUFFSIZE is too small, with the value to set.
    """

    def __init__(
        self,
        problem: Problem,
        experts: Experts,
        placement: Placement,
        group: dist.ProcessGroup | None = None,
        backend: str = "auto",
        exchange: str = "auto",
        wire: torch.dtype = torch.float32,
    ):
        if (experts.E, experts.H, experts.I) != (placement.E_local, problem.H, problem.I) or placement.E != problem.E:
            raise ContractError(
                "experts, placement and problem do not fit together",
                got=f"E={experts.E}, H={experts.H}, I={experts.I}; placement of {placement.E} experts",
                expected=f"E={problem.E}/{placement.D}, H={problem.H}, I={problem.I}",
            )
        if exchange not in EXCHANGES:
            raise ContractError("unknown exchange", got=repr(exchange), expected=f"one of {list(EXCHANGES)}")
        if wire not in (torch.float32, problem.dtype):
            raise ContractError("unsupported wire dtype", got=wire, expected=f"float32 or {problem.dtype}")
        self.problem, self.placement = problem, placement
        self._experts, self._backend = experts, registry.resolve(backend)
        self.exchange = self._choose(exchange, group, wire)

    def _choose(self, exchange: str, group: dist.ProcessGroup | None, wire: torch.dtype) -> Exchange:
        if exchange != "all_to_all":
            make = getattr(registry.choose(self._local(1, self.problem.K), self._backend), "exchange", None)
            try:
                if make is None:
                    raise BackendUnavailable(f"backend {self._backend!r} has no exchange of its own")
                return make(self.problem, self.placement, group)
            except BackendUnavailable as error:
                if exchange == "dispatch_combine":
                    raise
                logger.debug("auto chose the exchange all_to_all: {}", error)
        return AllToAll(self.placement, group, wire)

    def _local(self, T: int, K: int) -> Problem:
        """The problem of this process's experts."""
        return Problem.of(T, K, self._experts, self.problem.dtype)

    def __call__(
        self,
        hidden: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        out: Tensor | None = None,
        accumulate: bool = False,
    ) -> Tensor:
        routing = Routing.from_topk(topk_ids, topk_weights, self.problem.E, placement=self.placement)
        check_prepared(self.problem, hidden, routing, out, accumulate)
        received = self.exchange.dispatch(hidden.contiguous(), routing)
        expert_out = received.rows.new_empty(received.rows.shape, dtype=self.exchange.wire)
        local = Routing.from_topk(received.ids, received.weights, self.placement.E_local)
        api.moe(received.rows, local, self._experts, out=expert_out, backend=self._backend)
        total = self.exchange.combine(expert_out, received)
        if out is None:
            return total.to(self.problem.out_dtype)
        return out.copy_(total.float() + out if accumulate else total)
