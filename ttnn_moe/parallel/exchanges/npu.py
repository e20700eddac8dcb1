"""Expert parallelism by npu_moe_distribute_dispatch_v2 and combine_v2. Never run on an NPU: see docs/ascend.md.

The operators want expert e on rank e // (E / D), each id in 0 .. E-1, and no id twice in a token's row. So this module
renumbers global ids by where the experts live. Later duplicates give their weight to the first. A pair that names no
expert gets the id of one that its row does not use, with a weight of zero.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ascend import operators, path
from ...ascend.limits import PAGES, broken, describe
from ...ascend.operators import COMBINE, DISPATCH
from ...backend import RunsOnNpu
from ...contract import Experts, Placement, Problem, Routing
from ...errors import BackendUnavailable
from ...sizes import ceil_div
from .exchange import Topology
from .npu_limits import (
    ALGORITHMS,
    DEFAULT_BUFFER_MB,
    EXCHANGE_LIMITS,
    HIERARCHY_DRIVER,
    MB,
    buffer_bytes,
    rows_received,
)

BUFFER = "HCCL_BUFFSIZE"


@dataclass(frozen=True)
class Plan:
    """What all calls of one layer share. tokens: the most of any process; buffer: bytes that HCCL must hold."""

    comm_alg: str
    ranks: int
    rank: int
    E: int
    K: int
    H: int
    tokens: int
    dtype: torch.dtype
    buffer: int

    @property
    def rows(self) -> int:
        """A: the most rows that come to a process."""
        return rows_received(self.tokens, self.ranks, self.E, self.K)

    def common(self, group: str) -> dict[str, Any]:
        """Options that both operators take, and that must be equal."""
        return {
            "group_ep": group,
            "ep_world_size": self.ranks,
            "ep_rank_id": self.rank,
            "moe_expert_num": self.E,
            "global_bs": self.tokens * self.ranks,
            "comm_alg": self.comm_alg,
        }

    def calls(self, group: str) -> list[tuple[str, dict[str, Any]]]:
        """Both calls with meta tensors, for the check before the first launch."""

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        ids = empty(self.tokens, self.K, dtype=torch.int32)
        scales = empty(self.tokens, self.K, dtype=torch.float32)
        shared = {"expert_ids": ids, "expert_scales": scales, **self.common(group)}
        came = {
            "expand_x": empty(self.rows, self.H, dtype=self.dtype),
            "assist_info_for_combine": empty(self.rows * 128, dtype=torch.int32),
            "expand_scales": empty(self.rows, dtype=torch.float32),
        }
        x = empty(self.tokens, self.H, dtype=self.dtype)
        return [(DISPATCH, {"x": x, **shared}), (COMBINE, {**came, **shared})]


def plan(problem: Problem, placement: Placement, driver: str = "") -> Plan:
    """The algorithm for these sizes: hierarchy where its limits and the driver's version allow it, else fullmesh.

    driver: as in `operators.driver_version`; one that is not known is not held against anything.

    Raises:
        BackendUnavailable: neither is documented for them; or HCCL's buffer is too small, with the value to set.
    """
    assert placement.rank is not None
    reasons = []
    for comm_alg in ALGORITHMS:
        need = buffer_bytes(comm_alg, problem.T, placement.D, problem.E, problem.K, problem.H)
        made = Plan(
            comm_alg, placement.D, placement.rank, problem.E, problem.K, problem.H, problem.T, problem.dtype, need
        )
        wrong = [
            describe(row, arguments)
            for operator, arguments in made.calls("group")
            for row in broken(operator, arguments, EXCHANGE_LIMITS)
        ]
        if comm_alg == "hierarchy" and driver and operators.is_older(driver, HIERARCHY_DRIVER):
            wrong.append(f"the driver is {driver}, older than {HIERARCHY_DRIVER}; see {PAGES}torch_npu-{DISPATCH}.md")
        if not wrong:
            check_buffer(made)
            return made
        reasons.append(f"{comm_alg}: {wrong[0]}")
    raise BackendUnavailable(
        "npu_moe_distribute_dispatch_v2 is not documented for these sizes: " + "; ".join(reasons),
        remedy="exchange='all_to_all'",
    )


def check_buffer(made: Plan) -> None:
    """Raise BackendUnavailable unless HCCL_BUFFSIZE (MB; 200 when unset) holds what the plan needs."""
    text = os.environ.get(BUFFER, "")
    have = int(text) if text.strip().isdigit() else DEFAULT_BUFFER_MB
    need = ceil_div(made.buffer, MB)
    if have < need:
        raise BackendUnavailable(
            f"HCCL's buffer is too small for {made.comm_alg} with {made.tokens} tokens on each of {made.ranks} ranks",
            got=f"{BUFFER}={text or f'unset ({DEFAULT_BUFFER_MB})'}",
            expected=f"at least {need} (MB)",
            remedy=f"export {BUFFER}={need} in every process before torch.distributed starts, or fewer tokens",
        )


class DispatchCombine:
    """An Exchange over torch_npu's pair of operators. Nothing waits for the NPU; shapes follow from the plan.

    The operators apply the weights and sum over experts; results travel in the dtype of hidden. A process has room for
    all rows that it could receive; rows that did not come are in no group of the products.
    """

    name = "dispatch_combine"

    def __init__(self, npu: Any, made: Plan, placement: Placement, group: str):
        _check_operators(npu)
        self.plan = made
        self._npu, self._group = npu, group
        # where each global expert stands when experts are numbered device by device
        contiguous = torch.empty(placement.E, dtype=torch.int32)
        contiguous[placement.device_expert_mapping.flatten().long()] = torch.arange(placement.E, dtype=torch.int32)
        self._contiguous = contiguous

    @classmethod
    def why_not(cls, problem: Problem, topology: Topology) -> str | None:
        backend = topology.backend
        if not isinstance(backend, RunsOnNpu):
            return f"backend {backend.name!r} has no exchange of its own; to fix it: exchange='all_to_all'"
        npu = backend.npu()
        try:
            _check_operators(npu)
            plan(problem, topology.placement, operators.driver_version(npu))
        except BackendUnavailable as error:
            return str(error).removesuffix(".")
        return backend.why_no_group(topology.group)

    @classmethod
    def of(cls, problem: Problem, topology: Topology) -> DispatchCombine:
        backend = topology.backend
        assert isinstance(backend, RunsOnNpu)
        npu = backend.npu()
        made = plan(problem, topology.placement, operators.driver_version(npu))
        # last: to name a group is to make HCCL's buffers
        return cls(npu, made, topology.placement, backend.group_name(topology.group))

    def __call__(self, hidden: Tensor, routing: Routing, experts: Experts) -> Tensor:
        T = routing.T
        if T == 0:  # the operators want a token: one that names no expert
            routing = Routing.from_topk(
                routing.topk_ids.new_full((1, self.plan.K), -1),
                routing.topk_weights.new_zeros(1, self.plan.K),
                routing.E,
            )
            hidden = hidden.new_zeros(1, self.plan.H)
        ids, weights, absent = unique_ids(routing, self._contiguous.to(hidden.device))
        common = {"expert_ids": ids, "expert_scales": weights, **self.plan.common(self._group)}
        rows, _, assist, counts, recv, _, scales = self._npu.npu_moe_distribute_dispatch_v2(
            x=hidden, quant_mode=0, expert_token_nums_type=1, **common
        )
        expert_out = path.experts(self._npu, rows, counts, path.weights(self._npu, experts))
        out = self._npu.npu_moe_distribute_combine_v2(
            expand_x=expert_out, assist_info_for_combine=assist, ep_send_counts=recv, expand_scales=scales, **common
        )
        # zero times NaN is NaN: a token that names no expert at all has no part in what its row held
        return torch.where(absent.all(1, keepdim=True), 0.0, out)[:T]


def _check_operators(npu: Any) -> None:
    if absent := operators.missing(npu, operators.EXCHANGE):
        raise BackendUnavailable(
            f"this torch_npu has no {', '.join(absent)}", remedy="install a newer one, or exchange='all_to_all'"
        )


def unique_ids(routing: Routing, contiguous: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """ids [T, K] int32 in 0 .. E-1 with none twice in a row, weights [T, K] fp32, absent [T, K] bool.

    contiguous: [E] int32, the new number of each expert. An absent pair names no expert, or is a duplicate whose weight
    went to the first. It gets an expert that its row does not name, and weight zero; tokens get different ones. K <= E.
    """
    merged, weights = routing._merged
    absent = merged < 0
    T, E = routing.T, routing.E
    ids = torch.where(absent, E, contiguous[merged.clamp_min(0).long()].long())
    used = torch.zeros(T, E + 1, dtype=torch.bool, device=ids.device).scatter_(1, ids, True)[:, :E]
    expert = torch.arange(E, device=ids.device)
    turn = (expert - torch.arange(T, device=ids.device)[:, None] * routing.K) % E
    unused_first = (used * E + turn).float().argsort(1)  # exact; integers would be sorted by the AI CPU
    nth = (absent.long().cumsum(1) - 1).clamp_min(0)
    ids = torch.where(absent, unused_first.gather(1, nth), ids)
    return ids.int(), torch.where(absent, 0.0, weights), absent
