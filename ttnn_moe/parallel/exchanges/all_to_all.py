"""Tokens by torch.distributed's all_to_all_single, on any process group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ... import api
from ...contract import Experts, Placement, Problem, Routing
from . import agreement
from .exchange import Table, Topology, calls_of

FAILED = -1
"""Instead of a number of tokens: the rank that sends it ends the call of all."""


class AllToAll:
    """all_to_all_single of the process group, on gloo, NCCL or HCCL.

    A token goes once to each process that holds one of its experts, with its K ids and weights. That process sends
    back the weighted sum over its experts, in the dtype wire. Sums over processes are fp32, in ascending rank. Each
    call waits for the device once: the host reads the sizes of the messages.

    A process whose own work fails sends NaN for its sums, and ends the next call of all: RankStopped.
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
        calls, K, device = calls_of(self._group), routing.topk_ids.shape[1], hidden.device
        own = calls.own()
        # E where there is no expert, also past num_tokens
        ids, needs, sent = own.do(lambda: self._plan(routing), lambda: self._no_plan(routing))
        came = torch.empty_like(sent)
        dist.all_to_all_single(came, sent, group=self._group)
        to, of = torch.stack([sent, came]).tolist()  # the one wait
        if FAILED in of:  # also where this rank says it: all ranks read the same
            calls.tells = False
            raise agreement.stopped_by(own.failure, self._group)

        def taken() -> tuple[Tensor, Tensor, Tensor]:
            tokens = self._tokens(needs, sum(to))
            pairs = torch.cat([ids, routing.topk_weights.view(torch.int32)], 1)
            return tokens, hidden.index_select(0, tokens), pairs.index_select(0, tokens)

        def run() -> None:
            ids, weights = pairs[:, :K], pairs[:, K:].contiguous().view(torch.float32)
            local = self._placement.local_table(None, device).index_select(0, ids.flatten()).view(ids.shape)
            routed = Routing.from_topk(local, weights, experts.E)
            api.moe(rows, routed, experts, out=expert_out, backend=self._backend)

        def none() -> tuple[Tensor, Tensor, Tensor]:
            n = sum(to)
            tokens = torch.zeros(n, dtype=torch.int32, device=device)
            return tokens, hidden.new_zeros(n, hidden.shape[1]), tokens.new_zeros(n, 2 * K)

        tokens, rows, pairs = own.do(taken, none)
        rows, pairs = (self._move(tensor, to, of) for tensor in (rows, pairs))
        expert_out = rows.new_empty(rows.shape, dtype=self._wire)
        own.do(run, lambda: None)
        if own.failure is not None:  # the others are in this call, and learn of it in the next one
            expert_out.fill_(torch.nan)
        back = self._move(expert_out, of, to)
        if own.failure is not None:
            calls.tells = True
            raise own.failure
        total = torch.zeros(hidden.shape, dtype=torch.float32, device=back.device)
        # a token stands once in each part: the order of additions is that of the ranks
        for part, those in zip(back.split(to), tokens.split(to), strict=True):
            total.index_add_(0, those, part.float())
        return total

    def _plan(self, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
        """ids [T, K], which process needs which token [D, T], and how many tokens each needs [D]."""
        (T, K), ids = routing.topk_ids.shape, routing.ids_or(routing.E)
        owner = self._owner_of.on(ids.device).index_select(0, ids.flatten()).view(T, K)
        devices = torch.arange(self._placement.D, dtype=torch.int32, device=ids.device)
        needs = (owner == devices[:, None, None]).any(-1)
        return ids, needs, needs.sum(1)

    def _no_plan(self, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
        """Of a rank that failed: it sends no token, and says so."""
        ids = routing.topk_ids
        return ids, ids, torch.full((self._placement.D,), FAILED, dtype=torch.int64, device=ids.device)

    def _tokens(self, needs: Tensor, n: int) -> Tensor:
        """[n] int32: the tokens to send, by process, then by token."""
        D, T = needs.shape
        # a stable sort of floats, as nonzero waits and integers go to the AI CPU of an NPU
        first = (~needs).flatten().float().sort(stable=True).indices
        token = torch.arange(T, dtype=torch.int32, device=needs.device).expand(D, T).flatten()
        return token.index_select(0, first[:n])

    def _move(self, tensor: Tensor, to: list[int], of: list[int]) -> Tensor:
        """Rows, to[d] of them for process d; returns of[d] rows from process d, in ascending d."""
        out = tensor.new_empty(sum(of), *tensor.shape[1:])
        dist.all_to_all_single(out, tensor.contiguous(), of, to, group=self._group)
        return out
