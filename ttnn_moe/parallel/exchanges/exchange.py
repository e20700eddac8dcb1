"""What moves tokens between the processes that share the experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...backend import Backend
from ...contract import Experts, Placement, Problem, Routing
from ..hierarchical import Nodes


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


def world_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, or that of all processes."""
    found = group or dist.group.WORLD
    assert found is not None, "torch.distributed is not started"
    return found


class Mover(Protocol):
    """One way to move tokens in one group of processes, made ready. All processes call it, in turn, also with no token.

    name: as in ExpertParallel's argument exchange.
    """

    @property
    def name(self) -> str: ...

    def __call__(self, hidden: Tensor, routing: Routing, experts: Experts) -> Tensor:
        """Each token [T, H] through its experts, wherever they live; returns its sum over all of them, [T, H].

        routing: global ids. experts: those of this process. Rows past routing.num_tokens are undefined.
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
