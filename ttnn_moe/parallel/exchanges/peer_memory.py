"""Tokens by the CUDA kernels of dispatch and combine, over torch's symmetric memory: GPUs of one host."""

from __future__ import annotations

import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import fields
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ... import registry
from ...backend import Prepared, SharesScratch
from ...contract import Experts, Problem, Routing
from ...cuda.combine.channel import Channel, Sizes
from ...cuda.combine.kernel import RingPlan
from ...cuda.device import gpu
from ...errors import ContractError
from ..hierarchical import Nodes, PeerStopped, Report
from ..hierarchical.nodes import MOST
from . import agreement, symmetric
from .exchange import Topology, captures, nodes_of, refusal, world_of

SMS = 24
"""Multiprocessors of a launch."""
LOOK = 0.1
"""Seconds between two looks of eager calls at what the kernels report."""
REMEDY = "leave more memory of each GPU free, or exchange='all_to_all'"


class PeerMemoryExchange:
    """An Exchange between GPUs of one host, one rank each. The host waits for nothing; CUDA graphs can hold a call.

    A rank weighs and sums its own experts, and rounds once to the dtype of hidden. tree_sum defines the sum of ranks.
    A rank that stops ends the kernels of all within the timeout; `check` then raises PeerStopped.
    """

    name = "peer_memory"

    def __init__(self, channel: Channel, problem: Problem, topology: Topology):
        self._channel, self._backend, self._timeout = channel, topology.backend.name, topology.timeout
        self._rank, self._group, self._T = topology.placement.rank or 0, topology.group, problem.T
        self._local: Prepared | None = None
        self._looked = time.monotonic()

    @classmethod
    def why_not(cls, problem: Problem, topology: Topology) -> str | None:
        D = topology.placement.D
        if not 2 <= D <= MOST:
            return f"{D} ranks; one node has 2 to {MOST}; to fix it: exchange='all_to_all'"
        if topology.wire != problem.dtype:
            return f"results travel in the dtype of hidden; to fix it: wire={problem.dtype}"
        try:
            _sizes(problem, topology).plans()
        except ContractError as error:
            return refusal(error)
        return None if _reaches_peers() else "its GPU does not reach all others' memory; use exchange='all_to_all'"

    @classmethod
    def of(cls, problem: Problem, topology: Topology) -> PeerMemoryExchange:
        # a layer's first call may be under inference_mode, and a later one outside
        with torch.inference_mode(False), torch.no_grad():
            return cls(_channel_of(problem, topology), problem, topology)

    def ready(self, experts: Experts) -> None:
        """Make all that calls of this rank's experts take; every rank calls it, before the first call.

        A rank that found no memory behind its dispatch would let the others' kernels wait.

        Raises:
            BackendUnavailable: on all ranks: one has too little memory, or cannot make its kernels ready.
        """
        rows = self._channel.expert_out
        with agreement.all_or_none(self._group, "a rank cannot make its experts ready", REMEDY):
            with torch.inference_mode(False):
                # row n is n
                self._counts = torch.arange(self._T + 1, dtype=torch.int32, device=rows.device)[:, None]
            self.renew(experts)

    def renew(self, experts: Experts) -> None:
        """As ready, for this rank alone: its experts need other kernels, and lie where they lay."""
        channel = self._channel
        rows = channel.expert_out
        with torch.inference_mode(False), torch.no_grad():
            problem = Problem.of(len(rows), channel.came.ids.shape[1], experts, rows.dtype)
            backend = registry.choose(problem, self._backend)
            if isinstance(backend, SharesScratch):  # a channel's calls follow one another, whatever their streams
                local = backend.prepare_in_turn(problem, experts, None, channel)
            else:
                local = backend.prepare(problem, experts, None)
            local.compile(len(rows))
        self._local = local

    def __call__(self, hidden: Tensor, routing: Routing, experts: Experts) -> Tensor:
        out = hidden.new_empty(hidden.shape)
        self.into(hidden, routing, out, False)
        return out

    def into(self, hidden: Tensor, routing: Routing, out: Tensor, accumulate: bool) -> None:
        """As a call, written or added to out [T, H]; rows from routing.num_tokens on stay as they are.

        The experts are those of `ready`. out: contiguous, at a multiple of 16 bytes.
        """
        channel, local, count = self._channel, self._local, routing.num_tokens
        assert local is not None, "ready makes it"
        if count is None:
            count = self._counts[len(hidden)]
        elif len(hidden) < len(self._counts) - 1:  # the kernels know the most that a call may have
            count = count.clamp(max=len(hidden))
        ids = routing.topk_ids if routing.topk_ids.dtype == torch.int32 else routing.ids  # 2^32 + 1 names no expert
        ids, weights = ids.contiguous(), routing.topk_weights.contiguous()
        came = channel.dispatch(_aligned(hidden), ids, weights, count)
        local(came.rows, came.ids, came.weights, out=channel.expert_out, num_tokens=came.A)
        channel.combine(out, count, out if accumulate else None)

    def look(self) -> None:
        """Behind the calls so far, the GPU tells the host what `check` says; a CUDA graph can hold it."""
        self._channel.look()

    def look_at_times(self) -> None:
        """As look, once in LOOK seconds and outside captures: the next call raises where nobody asks `check`."""
        now = time.monotonic()
        if now - self._looked > LOOK and self.sends:
            self._looked = now
            self.look()

    def check(self) -> None:
        """Waits for nothing, and knows what the last `look` that is over saw.

        Raises:
            PeerStopped: a rank stopped, and the group is dead.
        """
        found = self._channel.seen()
        if found is not None:
            raise PeerStopped(Report(*found), self._rank, self._timeout)

    @property
    def sends(self) -> bool:
        """Whether a call now sends anything: neither alone nor in a capture."""
        return not (self._channel.alone or captures(self._channel.expert_out.device))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Calls inside send nothing, and the experts run no row: what they compile and allocate is all they do."""
        self._channel.alone = True
        try:
            yield
        finally:
            self._channel.alone = False


def _aligned(rows: Tensor) -> Tensor:
    """rows, or a copy of them: contiguous, at a multiple of 16 bytes, as the kernels load them."""
    rows = rows.contiguous()
    return rows.clone() if rows.data_ptr() % 16 else rows


def _reaches_peers() -> bool:
    count = torch.cuda.device_count()
    here = torch.cuda.current_device()
    return all(n == here or torch.cuda.can_device_access_peer(here, n) for n in range(count))


def _sizes(problem: Problem, topology: Topology) -> Sizes:
    nodes = nodes_of(topology, Nodes(1, topology.placement.D))
    fast = torch.cuda.is_available() and gpu().capability[0] == 9  # a block of 12.x has too little shared memory
    return Sizes(nodes.inter, nodes.intra, problem.H, max(problem.T, 1), problem.dtype, problem.K, SMS, fast)


_CHANNELS: MutableMapping[dist.ProcessGroup, dict[tuple[Sizes, tuple[int, ...], float], Channel]] = WeakKeyDictionary()
"""Layers of one size, placement and timeout share a channel. Ranks ask in the same order, so all find or make one."""


def _channel_of(problem: Problem, topology: Topology) -> Channel:
    placement, world = topology.placement, world_of(topology.group)
    made, sizes = _CHANNELS.setdefault(world, {}), _sizes(problem, topology)
    key = sizes, tuple(placement.device_expert_mapping.flatten().tolist()), topology.timeout
    if key not in made:
        assert placement.rank is not None
        heaps: dict[RingPlan, tuple[Tensor, list[int]]] = {plan: _heap(plan, world) for plan in sizes.plans()}
        device, heap = torch.cuda.current_device(), heaps.__getitem__
        with agreement.all_or_none(world, "a rank cannot make its kernels ready", REMEDY):
            channel = Channel(sizes, placement, placement.rank, device, heap, topology.timeout)
        made[key] = channel
    return made[key]


def _heap(plan: RingPlan, world: dist.ProcessGroup) -> tuple[Tensor, list[int]]:
    """This rank's heap, zeroed on all ranks, and the addresses of every rank's.

    Raises:
        ContractError: on all ranks: another rank has another plan, so its heap has other parts.
        BackendUnavailable: on all ranks: see symmetric.shared.
    """
    agreement.check_same(world, **{field.name: getattr(plan, field.name) for field in fields(plan)})
    return symmetric.shared(plan.heap, torch.device("cuda", torch.cuda.current_device()), world, REMEDY)
