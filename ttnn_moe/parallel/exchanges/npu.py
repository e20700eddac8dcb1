"""Expert parallelism by npu_moe_distribute_dispatch_v2 and combine_v2. Never run on an NPU: see docs/ascend.md.

The operators want expert e on rank e // (E / D), each id in 0 .. E-1, and no id twice in a token's row. So this module
renumbers global ids by where the experts live. Later duplicates give their weight to the first. A pair that names no
expert gets the id of one that its row does not use, with a weight of zero.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...ascend import groups, operators, path
from ...ascend.run import is_distinct
from ...backend import RunsOnNpu
from ...contract import Experts, Placement, Problem, Routing
from ...errors import BackendUnavailable
from . import agreement
from .exchange import Table, Topology, calls_of
from .npu_plan import REMEDY, Plan, plan


class DispatchCombine:
    """An Exchange over torch_npu's pair of operators. Nothing waits for the NPU; shapes follow from the plan.

    The operators apply the weights and sum over experts; results travel in the dtype of hidden. A process has room for
    all rows that it could receive; rows that did not come are in no group of the products.
    """

    name = "dispatch_combine"

    def __init__(
        self, npu: Any, made: Plan, placement: Placement, group: str, processes: dist.ProcessGroup | None = None
    ):
        if absent := operators.missing(npu, operators.EXCHANGE):
            raise BackendUnavailable(
                f"this torch_npu has no {', '.join(absent)}", remedy=f"install a newer one, or {REMEDY}"
            )
        self.plan = made
        self._npu, self._group, self._processes = npu, group, processes
        # where each global expert stands when experts are numbered device by device
        mapping = placement.device_expert_mapping.flatten()
        contiguous = torch.empty_like(mapping)
        contiguous[mapping.long()] = torch.arange(placement.E, dtype=torch.int32, device=mapping.device)
        self._contiguous, self._turn = Table(contiguous), Table(turns(made.tokens, placement.E, made.K))

    @classmethod
    def why_not(cls, problem: Problem, topology: Topology) -> str | None:
        backend, group = topology.backend, topology.group
        if not isinstance(backend, RunsOnNpu):
            return f"backend {backend.name!r} has no exchange of its own; to fix it: exchange='all_to_all'"
        try:
            made = plan(problem, topology.placement, agreement.machines(backend, group))
        except BackendUnavailable as error:
            return str(error).removesuffix(".")
        if (taken := groups.global_bs(group)) not in (None, made.global_bs):
            return (
                f"global_bs is one for all layers of a group: the first took {taken}, and T={made.tokens} on each of "
                f"{made.ranks} ranks gives {made.global_bs}; to fix it: one T for all layers, or a group of its own"
            )
        return backend.why_no_group(group)

    @classmethod
    def of(cls, problem: Problem, topology: Topology) -> DispatchCombine:
        backend, group = topology.backend, topology.group
        assert isinstance(backend, RunsOnNpu)
        machines = agreement.machines(backend, group)
        # to name a group is to make HCCL's buffers, which may fail: then no layer took a number of tokens
        with agreement.all_or_none(group, "a rank cannot make dispatch_combine ready", REMEDY):
            made = plan(problem, topology.placement, machines)
            found = cls(backend.npu(), made, topology.placement, backend.group_name(group), group)
        groups.take_global_bs(group, made.global_bs)
        return found

    def __call__(self, hidden: Tensor, routing: Routing, experts: Experts) -> Tensor:
        calls = calls_of(self._processes)
        calls.check()
        own, T = calls.own(), routing.T
        if T == 0:  # the operators want a token: one that names no expert
            routing = Routing.from_topk(
                routing.topk_ids.new_full((1, self.plan.K), -1),
                routing.topk_weights.new_zeros(1, self.plan.K),
                routing.E,
            )
            hidden = hidden.new_zeros(1, self.plan.H)
        contiguous, absent = self._contiguous.on(hidden.device), None
        if is_distinct(routing):
            # an id that breaks the promise reads within the table
            known = routing.topk_ids.clamp_min(0).clamp_max(routing.E - 1)
            ids = contiguous.index_select(0, known.flatten()).view(known.shape)
            weights = routing.topk_weights
        else:
            ids, weights, absent = unique_ids(routing, contiguous, self._turn.on(hidden.device))
        common = {"expert_ids": ids, "expert_scales": weights, **self.plan.common(self._group)}
        rows, _, assist, counts, recv, _, scales = self._npu.npu_moe_distribute_dispatch_v2(
            x=hidden, quant_mode=0, expert_token_nums_type=1, **common
        )
        # the other ranks wait in their combine
        expert_out = own.do(
            lambda: path.experts(self._npu, rows, counts, path.weights(self._npu, experts)),
            lambda: torch.full_like(rows, torch.nan),
        )
        out = self._npu.npu_moe_distribute_combine_v2(
            expand_x=expert_out, assist_info_for_combine=assist, ep_send_counts=recv, expand_scales=scales, **common
        )
        if own.failure is not None:
            raise own.failure
        if absent is not None:
            # zero times NaN is NaN: a token that names no expert at all has no part in what its row held
            out = out.masked_fill(absent.all(1, keepdim=True), 0)
        return out[:T]


def turns(T: int, E: int, K: int) -> Tensor:
    """[T, E] fp32: the place of each expert in the order in which a token's absent pairs take experts."""
    expert, token = (torch.arange(n, device="cpu") for n in (E, T))
    return ((expert - token[:, None] * K) % E).float()


def unique_ids(routing: Routing, contiguous: Tensor, turn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ids [T, K] int32 in 0 .. E-1 with none twice in a row, weights [T, K] fp32, absent [T, K] bool.

    contiguous: [E] int32, the new number of each expert. An absent pair names no expert, or is a duplicate whose weight
    went to the first. It gets an expert that its row does not name, and weight zero; tokens get different ones. K <= E.

    turn: of `turns`, for as many tokens or more. Sorts and running sums are of floats, and exact: an NPU gives those of
    integers to its AI CPU.
    """
    merged, weights = routing._merged
    absent = merged < 0
    T, E = routing.T, routing.E
    ids = contiguous.index_select(0, merged.clamp_min(0).flatten()).view(T, routing.K).masked_fill(absent, E)
    used = (ids[:, :, None] == torch.arange(E, dtype=torch.int32, device=ids.device)).any(1)
    turn = turn[:T]
    unused_first = torch.where(used, turn + E, turn).sort(1).indices
    nth = (absent.float().cumsum(1) - 1).clamp_min(0).long()
    ids = torch.where(absent, unused_first.gather(1, nth).int(), ids)
    return ids, weights.masked_fill(absent, 0), absent
