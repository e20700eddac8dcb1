"""Tokens by torch.distributed's all_to_all_single, on any process group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ... import api
from ...contract import Experts, Placement, Problem, Routing
from .exchange import Table, Topology


class AllToAll:
    """all_to_all_single of the process group, on gloo, NCCL or HCCL.

    A token goes once to each process that holds one of its experts, with its K ids and weights. That process sends
    back the weighted sum over its experts, in the dtype wire. Sums over processes are fp32, in ascending rank. Each
    call waits for the device once: the host reads the sizes of the messages.
    """

    name = "all_to_all"

    def __init__(
        self,
        placement: Placement,
        group: dist.ProcessGroup | None = None,
        wire: torch.dtype = torch.float32,
        backend: str = "auto",
    ):
        self._group, self._placement, self._wire, self._backend = group, placement, wire, backend
        # D, which is no process, for the id E, which is no expert
        owner = placement.device_of
        self._owner_of = Table(torch.cat([owner, owner.new_full((1,), placement.D)]))

    @classmethod
    def why_not(cls, problem: Problem, topology: Topology) -> str | None:
        return None

    @classmethod
    def of(cls, problem: Problem, topology: Topology) -> AllToAll:
        return cls(topology.placement, topology.group, topology.wire, topology.backend.name)

    def __call__(self, hidden: Tensor, routing: Routing, experts: Experts) -> Tensor:
        # E where there is no expert, also past num_tokens
        D, (T, K), ids = self._placement.D, routing.topk_ids.shape, routing.ids_or(routing.E)
        device = ids.device
        owner = self._owner_of.on(device).index_select(0, ids.flatten()).view(T, K)
        needs = (owner == torch.arange(D, dtype=torch.int32, device=device)[:, None, None]).any(-1)  # [D, T]
        sent = needs.sum(1)
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent, group=self._group)
        # by process, then by token; a stable sort of floats, as nonzero waits and integers go to the AI CPU of an NPU
        first = (~needs).flatten().float().sort(stable=True).indices
        to, of = torch.stack([sent, came]).tolist()  # the one wait
        token = torch.arange(T, dtype=torch.int32, device=device).expand(D, T).flatten()
        tokens = token.index_select(0, first[: sum(to)])
        pairs = torch.cat([ids, routing.topk_weights.view(torch.int32)], 1)
        rows, pairs = (self._move(tensor.index_select(0, tokens), to, of) for tensor in (hidden, pairs))
        ids, weights = pairs[:, :K], pairs[:, K:].contiguous().view(torch.float32)
        local = self._placement.local_table(None, device).index_select(0, ids.flatten()).view(ids.shape)
        expert_out = rows.new_empty(rows.shape, dtype=self._wire)
        api.moe(rows, Routing.from_topk(local, weights, experts.E), experts, out=expert_out, backend=self._backend)
        back = self._move(expert_out, of, to)
        total = torch.zeros(hidden.shape, dtype=torch.float32, device=back.device)
        # a token stands once in each part: the order of additions is that of the ranks
        for part, those in zip(back.split(to), tokens.split(to), strict=True):
            total.index_add_(0, those, part.float())
        return total

    def _move(self, tensor: Tensor, to: list[int], of: list[int]) -> Tensor:
        """Rows, to[d] of them for process d; returns of[d] rows from process d, in ascending d."""
        out = tensor.new_empty(sum(of), *tensor.shape[1:])
        dist.all_to_all_single(out, tensor.contiguous(), of, to, group=self._group)
        return out
