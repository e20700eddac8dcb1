"""What moves tokens between the processes that share the experts, and the one that runs on any process group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..contract import Placement, Routing
from ..errors import ContractError


@dataclass(frozen=True)
class Received:
    """Rows that came to this process, to be run through its experts.

    Attributes:
        rows: [R, H]. ids: [R, k] int32, this process's experts, -1 for none. weights: [R, k] fp32.
        state: what `combine` of the same exchange needs.
    """

    rows: Tensor
    ids: Tensor
    weights: Tensor
    state: dict[str, Any] = field(default_factory=dict)


class Exchange(Protocol):
    """Dispatch and combine of one group of processes. All of them call both, in turn, also with no token."""

    name: str
    wire: torch.dtype

    def dispatch(self, hidden: Tensor, routing: Routing) -> Received:
        """Send each token [T, H] to the processes that hold its experts; ids are global."""

    def combine(self, expert_out: Tensor, received: Received) -> Tensor:
        """Send [R, H] (dtype: wire) back; returns each token's sum over processes, [T, H]."""


class AllToAll:
    """all_to_all_single of the process group, on gloo, NCCL or HCCL.

    A token goes once to each process that holds one of its experts, with its K ids and weights; that process sends
    back the weighed sum over its experts. Sums over processes are fp32, in ascending rank. The sizes of the messages
    are read back: each dispatch waits for the device once.
    """

    name = "all_to_all"

    def __init__(self, placement: Placement, group: dist.ProcessGroup | None = None, wire: torch.dtype = torch.float32):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if placement.D != size or placement.rank != rank:
            raise ContractError(
                "the placement is not that of this process group",
                got=f"D={placement.D}, rank={placement.rank}",
                expected=f"D={size}, rank={rank}",
            )
        self.wire = wire
        self._group, self._placement = group, placement
        self._device_of, self._local_of = placement.device_of, placement.local_of()

    def dispatch(self, hidden: Tensor, routing: Routing) -> Received:
        D, ids = self._placement.D, routing.ids
        owner = self._device_of.to(ids.device)[ids.clamp_min(0).long()]
        owner = torch.where(ids < 0, -1, owner)
        needs = (owner[:, None, :] == torch.arange(D, device=ids.device)[:, None]).any(-1)  # [T, D]
        sent = needs.sum(0)
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent, group=self._group)
        to, of = sent.tolist(), came.tolist()
        tokens = needs.t().nonzero()[:, 1]  # by process, then by token
        # routing.ids are -1 where there is no expert, also past num_tokens
        rows, global_ids, weights = (
            self._move(tensor.index_select(0, tokens), to, of) for tensor in (hidden, ids, routing.topk_weights)
        )
        local = self._local_of.to(ids.device)[global_ids.clamp_min(0).long()]
        local = torch.where(global_ids < 0, -1, local)
        state = {"tokens": tokens, "to": to, "of": of, "T": routing.T}
        return Received(rows, local, weights, state)

    def combine(self, expert_out: Tensor, received: Received) -> Tensor:
        state = received.state
        back = self._move(expert_out, state["of"], state["to"])
        total = torch.zeros(state["T"], back.shape[1], device=back.device)
        # a token stands once in each part: the order of additions is that of the ranks
        for part, tokens in zip(back.split(state["to"]), state["tokens"].split(state["to"]), strict=True):
            total.index_add_(0, tokens, part.float())
        return total

    def _move(self, tensor: Tensor, to: list[int], of: list[int]) -> Tensor:
        """Rows, to[d] of them for process d; returns of[d] rows from process d, in ascending d."""
        out = tensor.new_empty(sum(of), *tensor.shape[1:])
        dist.all_to_all_single(out, tensor.contiguous(), of, to, group=self._group)
        return out
