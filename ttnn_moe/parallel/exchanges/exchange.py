"""What moves tokens between the processes that share the experts."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ...accelerator import is_accelerator, module_of, on
from ...backend import Backend
from ...contract import Experts, Placement, Problem, Routing
from ...errors import FIX, ContractError
from ...visible import said
from ..hierarchical import Nodes
from ..stopped import RankStopped, of_a_collective

V = TypeVar("V")


@dataclass(frozen=True)
class Topology:
    """The processes that share the experts, and what each of them runs.

    Attributes:
        placement: where experts live; its D is the number of ranks, its rank this process.
        backend: runs this process's experts. The device kind of the tensors is that of the problem.
        group: of torch.distributed; None: all processes.
        wire: dtype in which results travel, where the exchange lets a caller choose.
        nodes: of the hierarchical exchange; None: as few nodes as the number of ranks allows.
        timeout: of the hierarchical exchange, seconds without progress after which it ends the group.
    """

    placement: Placement
    backend: Backend
    group: dist.ProcessGroup | None = None
    wire: torch.dtype = torch.float32
    nodes: Nodes | None = None
    timeout: float = 30.0


def nodes_of(topology: Topology, unless_given: Nodes) -> Nodes:
    """topology.nodes, or these.

    Raises:
        ContractError: they are not those of D ranks.
    """
    nodes, D = topology.nodes or unless_given, topology.placement.D
    if nodes.R != D:
        raise ContractError(
            "the nodes are not those of this group",
            got=f"{nodes.R} ranks",
            expected=f"{D}",
            remedy=f"give Nodes of {D} ranks, or leave nodes out",
        )
    return nodes


def refusal(error: ContractError) -> str:
    """What why_not says of sizes that the hierarchical protocol refuses."""
    reason = str(error).removesuffix(".")
    return reason if error.remedy is not None else f"{reason}; {FIX}exchange='all_to_all'"


def world_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or that of all processes."""
    found = group or dist.group.WORLD
    assert found is not None, "torch.distributed is not started"
    return found


@dataclass
class Calls:
    """What this rank's layers of one process group share.

    A rank whose call failed may be a call apart from the others: its next message would meet another one of theirs. So
    it sends no token any more.

    Attributes:
        turn: held during a call.
        failure: why this rank's calls fail from now on.
        tells: the call that failed left no message of the others waiting, and the next one can tell them.
        waits: the kind of messages that the others may wait for since this rank refused a call; None: any.
        report: tells it to all ranks that somebody watches, before NaN reaches them; None: nobody watches.
        trying: a call that fails now is made again in another way.
    """

    turn: Lock = field(default_factory=Lock)
    failure: RankStopped | None = None
    tells: bool = False
    waits: object = None
    report: Callable[[str], object] | None = None
    trying: bool = False

    def check(self) -> None:
        """Raise RankStopped if this rank's calls fail."""
        if self.failure is not None:
            raise self.failure.again()

    def own(self) -> Own:
        """Of a call that takes part even where this rank's calls fail."""
        return Own(self.failure and self.failure.again(), self.say)

    def say(self, error: Exception) -> None:
        """All ranks learn that this error fails a call, if somebody watches."""
        if self.report is not None and not self.trying:
            self.report(said(error))

    def fail(self, error: BaseException, rank: int) -> None:
        """This error ended a call of this rank."""
        if self.failure is None and isinstance(error, RankStopped):
            self.failure = error.again()
        elif self.failure is None:
            peer = -1 if of_a_collective(error) and not self.tells else rank
            self.failure = RankStopped(peer, rank, said(error))


_CALLS: MutableMapping[dist.ProcessGroup, Calls] = WeakKeyDictionary()


def calls_of(group: dist.ProcessGroup | None) -> Calls:
    """Those of this rank in the group."""
    found = group or dist.group.WORLD
    return Calls() if found is None else _CALLS.setdefault(found, Calls())


def captures(device: torch.device) -> bool:
    """Whether the device's current stream captures a graph, so that what is launched does not run."""
    if not is_accelerator(device):
        return False
    capturing = getattr(module_of(device), "is_current_stream_capturing", None)  # an old torch_npu has no graphs
    if capturing is None:
        return False
    with on(device):
        return bool(capturing())


class Own:
    """This rank's own work in one call. The other ranks wait for it in the collectives between.

    Where it fails, the rank takes part in the rest of the call with what stands in, and raises `failure` at its end.
    """

    def __init__(self, failure: Exception | None, say: Callable[[Exception], None]):
        self.failure, self._say = failure, say

    def do(self, work: Callable[[], V], instead: Callable[[], V]) -> V:
        """What work makes; what stands in for it, if it or some work before it failed."""
        if self.failure is None:
            try:
                return work()
            except Exception as error:
                self.failure = error
                self._say(error)
        return instead()


class Mover(Protocol):
    """One way to move tokens in one group of processes, made ready. All processes call it, in turn, also with no token.

    name: as in ExpertParallel's argument exchange.
    """

    @property
    def name(self) -> str: ...

    def __call__(self, hidden: Tensor, routing: Routing, experts: Experts) -> Tensor:
        """Each token [T, H] through its experts, wherever they live; returns its sum over all of them, [T, H].

        routing: global ids. experts: those of this process. Rows past routing.num_tokens are undefined.

        Where this rank's own work fails between two messages, no other rank may wait for the rest: see Calls and Own.
        """


class Exchange(Mover, Protocol):
    """A kind of Mover: it says whether it can serve a layer, and makes itself ready."""

    name: str

    @classmethod
    def why_not(cls, problem: Problem, topology: Topology) -> str | None:
        """None if this process can serve calls of up to problem.T tokens, else the reason, with the remedy.

        All processes ask together, as they may tell each other what they know. `choose` tells them each other's answer.
        """

    @classmethod
    def of(cls, problem: Problem, topology: Topology) -> Mover:
        """Make it ready; every process does so. Only after why_not returned None on all."""


class Table:
    """A small tensor of the host, such as where each expert lives, that is copied to a device once."""

    def __init__(self, values: Tensor):
        self._on = {values.device: values}
        self._values = values

    def on(self, device: torch.device) -> Tensor:
        """The tensor on that device; only the first call for a device copies."""
        found = self._on.get(device)
        if found is None:
            found = self._on[device] = self._values.to(device)
        return found
