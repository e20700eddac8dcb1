"""Every process gets all tokens, runs its experts on them, and the sums are scattered back."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

from ... import api
from ...contract import Experts, Placement, Problem, Routing
from . import agreement
from .exchange import Topology, calls_of

DETERMINISTIC = "HCCL_DETERMINISTIC"
# the sorted rows of all tokens, which the experts of a process read; past this all_to_all takes less memory
MOST_BYTES = 4 << 30

# torch 2.13 renames them
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class AllGather:
    """AllGather and ReduceScatter of the process group, on gloo, NCCL or HCCL.

    Every message is problem.T rows of each process, whatever T a call has: nothing waits for the device, and a call can
    be captured in a graph. Prepare a layer for the tokens that its calls hold.

    The sum over processes is fp32 in ascending rank by default: parts travel by all_to_all_single and are added here.
    On a wire of fp32, where the library's order is fixed (two processes, or HCCL_DETERMINISTIC=true or strict on all),
    its ReduceScatter adds.

    A process whose own work fails takes part in this call and in later ones, sends NaN, and raises.

    Args:
        tokens: the most of any process. wire: dtype of the sums that travel.
        ordered: add here, in ascending rank; False: by ReduceScatter, in the library's order.
    """

    name = "all_gather"

    def __init__(
        self,
        placement: Placement,
        tokens: int,
        group: dist.ProcessGroup | None = None,
        wire: torch.dtype = torch.float32,
        backend: str = "auto",
        ordered: bool = True,
    ):
        self._group, self._placement, self._wire, self._backend = group, placement, wire, backend
        self.tokens, self.ordered = tokens, ordered

    @classmethod
    def why_not(cls, problem: Problem, topology: Topology) -> str | None:
        rows = problem.T * topology.placement.D * problem.K
        if (need := rows * problem.H * problem.dtype.itemsize) > MOST_BYTES:
            return (
                f"the rows of all {topology.placement.D} processes' tokens take {need} bytes, more than {MOST_BYTES}; "
                "to fix it: fewer tokens a call, or exchange='all_to_all'"
            )
        return None

    @classmethod
    def of(cls, problem: Problem, topology: Topology) -> AllGather:
        placement = topology.placement
        exact = topology.wire == torch.float32  # ReduceScatter adds in the dtype of the wire
        fixed = exact and placement.D <= 2
        if exact and not fixed:  # a rank may lack the variable, and all make the same calls
            asked = os.environ.get(DETERMINISTIC, "").strip().lower() in ("true", "strict")
            fixed = all(agreement.gather(asked, topology.group))
        return cls(placement, problem.T, topology.group, topology.wire, topology.backend.name, ordered=not fixed)

    def __call__(self, hidden: Tensor, routing: Routing, experts: Experts) -> Tensor:
        T, K, H, most = routing.T, routing.K, hidden.shape[1], self.tokens
        if most == 0:
            return hidden.new_zeros(0, H, dtype=torch.float32)
        calls = calls_of(self._group)
        own = calls.own()

        def padded() -> tuple[Tensor, Tensor]:
            # ids and weights in one message; E where there is no expert, also past num_tokens and past T
            pairs = torch.cat([routing.ids_or(routing.E), routing.topk_weights.view(torch.int32)], 1)
            if T == most:
                return hidden, pairs
            rows = hidden.new_empty(most, H)
            rows[:T] = hidden
            return rows, torch.cat([pairs, pairs.new_full((most - T, 2 * K), routing.E)])

        def none() -> tuple[Tensor, Tensor]:
            return hidden.new_zeros(most, H), routing.topk_ids.new_full((most, 2 * K), routing.E, dtype=torch.int32)

        def run() -> None:
            ids, weights = pairs[:, :K], pairs[:, K:].contiguous().view(torch.float32)
            table = self._placement.local_table(None, ids.device)
            local = table.index_select(0, ids.flatten()).view(ids.shape)
            api.moe(rows, Routing.from_topk(local, weights, experts.E), experts, out=sums, backend=self._backend)

        rows, pairs = own.do(padded, none)
        rows, pairs = self._of_all(rows), self._of_all(pairs)
        sums = rows.new_empty(len(rows), H, dtype=self._wire)
        own.do(run, lambda: None)
        if own.failure is not None:
            sums.fill_(torch.nan)
        total = self._sum(sums)
        if own.failure is not None:
            calls.tells = True
            raise own.failure
        return total[:T]

    def _of_all(self, tensor: Tensor) -> Tensor:
        """[D * tokens, ...]: the tensor of each process, in ascending rank."""
        out = tensor.new_empty(self._placement.D * len(tensor), *tensor.shape[1:])
        _gather(out, tensor.contiguous(), group=self._group)
        return out

    def _sum(self, parts: Tensor) -> Tensor:
        """[tokens, H]: the sum over processes of this process's rows."""
        if not self.ordered:
            out = parts.new_empty(self.tokens, parts.shape[1])
            _reduce_scatter(out, parts, group=self._group)
            return out
        back = torch.empty_like(parts)
        dist.all_to_all_single(back, parts, group=self._group)
        first, *others = back.split(self.tokens)
        total = first.float()
        for part in others:
            total = total + part.float()
        return total
