"""Tokens by the CUDA kernels of dispatch and combine, over torch's symmetric memory: GPUs of one host."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ... import api
from ...contract import Experts, Placement, Problem, Routing
from ...cuda.combine.kernel import MOST_RANKS, RingPlan, stopped
from ...cuda.combine.rank_combine import Plan, RankCombine
from ...cuda.combine.rank_dispatch import DispatchPlan, RankDispatch, Received
from ...cuda.device import gpu
from ...errors import BackendUnavailable, ContractError
from ..hierarchical import Nodes, PeerStopped, Report
from ..hierarchical.nodes import MOST
from . import agreement
from .exchange import Topology, world_of

SMS = 24
"""Multiprocessors of a launch."""


@dataclass(frozen=True)
class Channel:
    """Kernels and tensors of one rank, for calls of up to T tokens; layers of the same sizes share it.

    Attributes:
        counts: [T + 1, 1] int32: row n is n. expert_out: [R * T, H].
    """

    dispatch: RankDispatch
    combine: RankCombine
    received: Received
    expert_out: Tensor
    counts: Tensor
    heaps: tuple[Tensor, Tensor]


class PeerMemoryExchange:
    """An Exchange between GPUs of one host, one rank each. The host waits for nothing; CUDA graphs can hold a call.

    A rank weighs and sums its own experts, and rounds once to the dtype of hidden. tree_sum defines the sum of ranks.
    A rank that stops ends the kernels of all within the timeout; `check` then raises PeerStopped.
    """

    name = "peer_memory"

    def __init__(self, channel: Channel, topology: Topology):
        self._channel, self._backend, self._timeout = channel, topology.backend.name, topology.timeout

    @classmethod
    def why_not(cls, problem: Problem, topology: Topology) -> str | None:
        D = topology.placement.D
        if not 2 <= D <= min(MOST, MOST_RANKS):
            return f"{D} ranks; one node has 2 to {MOST}; to fix it: exchange='all_to_all'"
        if topology.wire != problem.dtype:
            return f"results travel in the dtype of hidden; to fix it: wire={problem.dtype}"
        try:
            _plans(problem, topology)
        except ContractError as error:
            return str(error).removesuffix(".")
        hosts = agreement.gather(_reaches_peers(), topology.group)
        return None if all(hosts) else "not every GPU reaches all others' memory; to fix it: exchange='all_to_all'"

    @classmethod
    def of(cls, problem: Problem, topology: Topology) -> PeerMemoryExchange:
        return cls(_channel_of(problem, topology), topology)

    def __call__(self, hidden: Tensor, routing: Routing, experts: Experts) -> Tensor:
        channel, T = self._channel, len(hidden)
        received = channel.received
        count = channel.counts[T] if routing.num_tokens is None else routing.num_tokens
        ids, weights = routing.topk_ids.int(), routing.topk_weights
        hidden = hidden.contiguous()
        channel.dispatch.bind(0, hidden, ids, weights, count, received)
        channel.dispatch.launch()
        here = Routing.from_topk(received.ids, received.weights, experts.E, num_tokens=received.A)
        api.moe(received.rows, here, experts, out=channel.expert_out, backend=self._backend)
        out = torch.empty_like(hidden)
        channel.combine.bind(0, channel.expert_out, received.masks, received.row_of, received.tokens, out)
        channel.combine.launch()
        return out

    def check(self) -> None:
        """Waits for the GPU.

        Raises:
            PeerStopped: a rank stopped, and the group is dead.
        """
        for kernel, heap in zip((self._channel.dispatch, self._channel.combine), self._channel.heaps, strict=True):
            found = stopped(heap)
            if found is not None:
                raise PeerStopped(Report(*found), kernel.ranks[0], self._timeout)


def _reaches_peers() -> tuple[bool, ...] | bool:
    count = torch.cuda.device_count()
    here = torch.cuda.current_device()
    return all(n == here or torch.cuda.can_device_access_peer(here, n) for n in range(count))


def _plans(problem: Problem, topology: Topology) -> tuple[DispatchPlan, Plan]:
    nodes = topology.nodes or Nodes(1, topology.placement.D)
    if nodes.R != topology.placement.D:
        raise ContractError(
            "the nodes are not those of this group", got=f"{nodes.R} ranks", expected=f"{topology.placement.D}"
        )
    fast = torch.cuda.is_available() and gpu().capability[0] >= 9
    where = nodes.inter, nodes.intra, problem.H, max(problem.T, 1), problem.dtype, SMS, 8
    dispatch = DispatchPlan(*where, bulk=fast, overlap=fast, K=problem.K)
    return dispatch, Plan(*where, bulk=fast, overlap=fast, wire=problem.dtype)


_Key = tuple[DispatchPlan, tuple[int, ...]]
_CHANNELS: MutableMapping[dist.ProcessGroup, dict[_Key, Channel]] = WeakKeyDictionary()
"""Ranks ask in the same order, so all find or make one."""


def _channel_of(problem: Problem, topology: Topology) -> Channel:
    placement, world = topology.placement, world_of(topology.group)
    made = _CHANNELS.setdefault(world, {})
    dispatch, combine = _plans(problem, topology)
    key = dispatch, tuple(placement.device_expert_mapping.flatten().tolist())
    if key not in made:
        made[key] = _make(dispatch, combine, placement, world, topology.timeout)
    return made[key]


def _make(
    dispatch: DispatchPlan, combine: Plan, placement: Placement, world: dist.ProcessGroup, timeout: float
) -> Channel:
    rank, device = placement.rank, torch.cuda.current_device()
    assert rank is not None
    where = torch.device("cuda", device)
    (heap, to_dispatch), (other, to_combine) = (_heap(plan, where, world) for plan in (dispatch, combine))
    received = Received.empty(dispatch, where)
    return Channel(
        RankDispatch(dispatch, placement, device, [rank], to_dispatch, timeout),
        RankCombine(combine, device, [rank], to_combine, timeout),
        received,
        torch.empty_like(received.rows),
        torch.arange(dispatch.T + 1, dtype=torch.int32, device=where)[:, None],
        (heap, other),
    )


def _heap(plan: RingPlan, where: torch.device, world: dist.ProcessGroup) -> tuple[Tensor, list[int]]:
    """This rank's heap, zeroed on all ranks, and the addresses of every rank's."""
    import torch.distributed._symmetric_memory as symmetric

    heap: Tensor = symmetric.empty(plan.heap, dtype=torch.uint8, device=where)
    heap.zero_()
    try:
        handle = symmetric.rendezvous(heap, world)
    except RuntimeError as error:
        raise BackendUnavailable(
            "torch's symmetric memory does not reach all ranks", got=str(error), remedy="exchange='all_to_all'"
        ) from error
    torch.cuda.synchronize(where)
    agreement.gather(True, world)
    return heap, list(handle.buffer_ptrs)
