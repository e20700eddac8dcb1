"""Whether torch_npu's exchange can serve a layer, and by which algorithm: checked on the host before any launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...ascend.limits import broken, describe
from ...ascend.machine import BUFFER, NETWORK, SWITCH, Machine
from ...ascend.operators import COMBINE, DISPATCH
from ...ascend.versions import is_older
from ...contract import Placement, Problem
from ...errors import BackendUnavailable
from ...sizes import ceil_div, natural
from .npu_limits import (
    ALGORITHMS,
    DEFAULT_BUFFER_MB,
    HIERARCHY_DRIVER,
    KNOWN,
    MB,
    RANKS_OF_A_SERVER,
    Release,
    limits_of,
    release_of,
    rows_received,
)

REMEDY = "exchange='all_gather'"


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

    @property
    def global_bs(self) -> int:
        """The same for all layers of a group."""
        return self.tokens * self.ranks

    def common(self, group: str) -> dict[str, Any]:
        """Options that both operators take, and that must be equal."""
        return {
            "group_ep": group,
            "ep_world_size": self.ranks,
            "ep_rank_id": self.rank,
            "moe_expert_num": self.E,
            "global_bs": self.global_bs,
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


def plan(problem: Problem, placement: Placement, machines: Sequence[Machine]) -> Plan:
    """The algorithm for these sizes: hierarchy where its limits and the driver's version allow it, else fullmesh.

    machines: of all ranks, in their order. A driver that is not known is not held against anything.

    Raises:
        BackendUnavailable: a rank's software or the servers rule the operators out; or neither algorithm is documented
            for the sizes; or HCCL's buffer is too small, with the value to set.
    """
    assert placement.rank is not None and len(machines) == placement.D
    release = _release(machines)
    _check_servers(machines)
    old = min((one.driver for one in machines if one.driver and is_older(one.driver, HIERARCHY_DRIVER)), default="")
    reasons = []
    for comm_alg in ALGORITHMS:
        sizes = problem.T, placement.D, problem.E, problem.K, problem.H
        need = release.buffer_bytes(comm_alg, *sizes)
        made = Plan(
            comm_alg, placement.D, placement.rank, problem.E, problem.K, problem.H, problem.T, problem.dtype, need
        )
        wrong = [
            describe(row, arguments)
            for operator, arguments in made.calls("group")
            for row in broken(operator, arguments, limits_of(release))
        ]
        if comm_alg == "hierarchy" and old:
            wrong.append(f"the driver is {old}, older than {HIERARCHY_DRIVER}; see torch_npu-{DISPATCH}.md")
        if not wrong:
            _check_buffer(made, machines)
            return made
        reasons.append(f"{comm_alg}: {wrong[0]}")
    raise BackendUnavailable(
        f"{DISPATCH} of CANN {machines[0].cann} is not documented for these sizes: " + "; ".join(reasons), remedy=REMEDY
    )


def _release(machines: Sequence[Machine]) -> Release:
    """The limits that hold for all ranks: one CANN, known, with the operators."""
    if lacks := list(dict.fromkeys(name for one in machines for name in one.lacks)):
        raise BackendUnavailable(
            f"this torch_npu has no {', '.join(lacks)}", remedy=f"install a newer one, or {REMEDY}"
        )
    found = {one.cann for one in machines}
    if len(found) > 1:
        raise BackendUnavailable(
            "the ranks have different CANNs", got=_ranks_of([one.cann for one in machines]), remedy="install one on all"
        )
    (cann,) = found
    release = release_of(cann)
    if release is None:
        raise BackendUnavailable(
            "the limits of this CANN are not known" if cann else "CANN's version is not known",
            got=cann or "neither torch_npu nor the folder of ASCEND_HOME_PATH tells it",
            expected=f"CANN {', '.join(KNOWN)}",
            remedy=f"source CANN's set_env.sh, or {REMEDY}",
        )
    return release


def _check_servers(machines: Sequence[Machine]) -> None:
    """Server i must be ranks 8 i .. 8 i + 7: the operators divide a rank by 8 (SERVER_RANK_SIZE).

    What cannot be seen: cards that a container hides, and whether a switch joins two servers.
    """
    servers = [one.server for one in machines]
    if (cards := max(one.cards for one in machines)) > RANKS_OF_A_SERVER:
        raise BackendUnavailable(
            "the operators count 8 NPUs a server", got=f"a server of {cards}", expected="at most 8", remedy=REMEDY
        )
    count = len(set(servers))
    if count == 1 and len(servers) <= RANKS_OF_A_SERVER:
        return
    blocks = [servers[i : i + RANKS_OF_A_SERVER] for i in range(0, len(servers), RANKS_OF_A_SERVER)]
    if len(blocks) != count or any(len(set(block)) > 1 or len(block) < RANKS_OF_A_SERVER for block in blocks):
        raise BackendUnavailable(
            "the operators want 8 ranks on each server, in the order of the servers",
            got=_ranks_of(servers),
            expected=f"{len(blocks)} servers, ranks 8 i .. 8 i + 7 on server i",
            remedy=f"torchrun --nproc-per-node 8, or {REMEDY}",
        )
    if count == 2 and any(one.network != SWITCH for one in machines):
        raise BackendUnavailable(
            "two servers may be joined by cables, and the operators want a switch; no program can see which",
            got=f"{NETWORK}={_ranks_of([one.network or 'unset' for one in machines])}",
            expected=f"{NETWORK}={SWITCH}",
            remedy=f"where a switch joins them, export {NETWORK}={SWITCH} in every process; else {REMEDY}",
        )


def _check_buffer(made: Plan, machines: Sequence[Machine]) -> None:
    """HCCL_BUFFSIZE (MB; 200 when unset) of every rank must hold what the plan needs: the operators check nothing."""
    need = ceil_div(made.buffer, MB)
    have = [natural(one.buffer) if one.buffer else DEFAULT_BUFFER_MB for one in machines]
    if any(size is None or size < need for size in have):
        given = [f"{BUFFER}={one.buffer or f'unset ({DEFAULT_BUFFER_MB})'}" for one in machines]
        raise BackendUnavailable(
            f"HCCL's buffer is too small for {made.comm_alg} with {made.tokens} tokens on each of {made.ranks} ranks",
            got=_ranks_of(given),
            expected=f"at least {need} (MB)",
            remedy=f"export {BUFFER}={need} in every process before torch.distributed starts, or fewer tokens",
        )


def _ranks_of(values: Sequence[Hashable]) -> str:
    """Equal values once; else each with the number of ranks that have it."""
    counts = Counter(values)
    if len(counts) == 1:
        return str(values[0])
    return ", ".join(f"{value or 'unknown'} on {n} rank{'s' * (n > 1)}" for value, n in counts.items())
