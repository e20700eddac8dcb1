"""Tokens by the hierarchical protocol: once a node between nodes, sums in one fixed order. See docs/expert_parallel.md.

MACHINES says which exchange serves which machine.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import MutableMapping
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ... import api
from ...contract import Experts, Placement, Problem, Routing
from ...errors import ContractError
from ..hierarchical import Group, Nodes, PeerStopped, Shape, Sizes
from ..hierarchical.nodes import MOST
from ..hierarchical.shared_memory import SharedMemory, SharedMemoryTransport
from . import agreement
from .exchange import Exchange, Mover, Topology, calls_of, nodes_of, refusal, world_of
from .npu import DispatchCombine
from .peer_memory import PeerMemoryExchange

CHANNELS, SLOTS = 1, 8


class SharedMemoryExchange:
    """An Exchange between processes on one host's CPUs, over shared memory.

    A rank weighs and sums its own experts in fp32. Results travel in the dtype wire; tree_sum defines their sum.
    """

    name = "shared_memory"

    def __init__(self, group: Group, topology: Topology):
        self.group, self._backend, self._calls = group, topology.backend.name, calls_of(topology.group)

    @classmethod
    def why_not(cls, problem: Problem, topology: Topology) -> str | None:
        D = topology.placement.D
        if sys.platform != "linux":
            return "shared memory without a name is Linux's; to fix it: exchange='all_to_all'"
        if platform.machine() not in ("x86_64", "AMD64"):
            return f"it needs x86's order of stores, and this is {platform.machine()}; use exchange='all_to_all'"
        hosts = {os.environ.get(name) or None for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        if None not in hosts and len(hosts) > 1:
            return "the ranks are on several hosts, and no transport between hosts is here; use exchange='all_to_all'"
        if topology.wire == torch.float16:
            return "results travel in bfloat16 or float32; to fix it: wire=torch.float32"
        try:
            sizes_of(problem, topology)
        except ContractError as error:
            return refusal(error)
        return None if D > 1 else "one rank has nobody to exchange with; to fix it: exchange='all_to_all'"

    @classmethod
    def of(cls, problem: Problem, topology: Topology) -> SharedMemoryExchange:
        return cls(_group_of(sizes_of(problem, topology), topology), topology)

    def __call__(self, hidden: Tensor, routing: Routing, experts: Experts) -> Tensor:
        if self._calls.failure is not None:
            self.group.leave()  # it failed in another layer; the others learn it here
        try:
            sent = self.group.dispatch(hidden, routing.ids, routing.topk_weights)
            rows = sent.rows.new_empty(sent.rows.shape, dtype=torch.float32)
            here = Routing.from_topk(sent.ids, sent.weights, experts.E)
            api.moe(sent.rows, here, experts, out=rows, backend=self._backend)
            return self.group.combine(rows, sent.meta)
        except PeerStopped:
            raise
        except BaseException:
            self.group.leave()  # the others wait for this rank's part of the call, and not for another call
            self._calls.tells = True
            raise


MACHINES: dict[str, type[Exchange]] = {"cpu": SharedMemoryExchange, "cuda": PeerMemoryExchange, "npu": DispatchCombine}
"""By device type. Between hosts only the NPU's operators serve, by comm_alg "hierarchy"."""


class Hierarchical:
    """The exchange that MACHINES names for the device of the tensors."""

    name = "hierarchical"

    def __init__(self, transport: Mover):
        self.transport = transport

    @classmethod
    def why_not(cls, problem: Problem, topology: Topology) -> str | None:
        exchange = MACHINES.get(problem.device)
        if exchange is None:
            return f"no transport for {problem.device}; to fix it: exchange='all_to_all'"
        if exchange is DispatchCombine and topology.nodes is not None:
            return "torch_npu's operators find their servers themselves; to fix it: leave nodes out"
        return exchange.why_not(problem, topology)

    @classmethod
    def of(cls, problem: Problem, topology: Topology) -> Hierarchical:
        return cls(MACHINES[problem.device].of(problem, topology))

    def __call__(self, hidden: Tensor, routing: Routing, experts: Experts) -> Tensor:
        return self.transport(hidden, routing, experts)


def sizes_of(problem: Problem, topology: Topology) -> Sizes:
    """Sizes of a layer's rings. Without topology.nodes, nodes have as many ranks, at most eight, as divide D.

    Raises:
        ContractError: the protocol does not take the sizes, or the nodes are not those of D ranks.
    """
    D = topology.placement.D
    intra = max(n for n in range(1, MOST + 1) if D % n == 0)
    nodes = nodes_of(topology, Nodes(D // intra, intra))
    return Sizes(Shape(nodes, CHANNELS, SLOTS), problem.T, problem.H, problem.K, problem.dtype, topology.wire)


def abandon(group: dist.ProcessGroup | None) -> None:
    """This rank leaves after an error: ranks that wait for it in a hierarchical exchange stop now."""
    for made in _GROUPS.get(world_of(group), {}).values():
        made.leave()


_Key = tuple[Sizes, tuple[int, ...], float]
_GROUPS: MutableMapping[dist.ProcessGroup, dict[_Key, Group]] = WeakKeyDictionary()
"""Layers of the same sizes, placement and timeout share rings. Ranks ask in the same order, so all find or make one."""


def _group_of(sizes: Sizes, topology: Topology) -> Group:
    world = world_of(topology.group)
    made = _GROUPS.setdefault(world, {})
    key = sizes, tuple(topology.placement.device_expert_mapping.flatten().tolist()), topology.timeout
    if key not in made:
        made[key] = Group(_attach(sizes, topology.placement, world), sizes, topology.placement, topology.timeout)
    return made[key]


def _attach(sizes: Sizes, placement: Placement, world: dist.ProcessGroup) -> SharedMemoryTransport:
    """The memory of all ranks, which the first makes; all ranks raise where one cannot attach."""
    rank = placement.rank
    assert rank is not None
    attaching = partial(
        agreement.all_or_none,
        world,
        "not every rank can attach to the shared memory of rank 0",
        "run all ranks on one host, in one PID namespace; or exchange='all_to_all'",
    )
    with attaching():
        memory = SharedMemory(sizes.layout) if rank == 0 else None
    name = agreement.gather(memory.name if memory else "", world)[0]
    with attaching():
        memory = memory or SharedMemory(sizes.layout, name)
    memory.detach_name()
    return SharedMemoryTransport(memory, rank)
