"""Exchanges, and which of them "auto" takes."""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from loguru import logger

from ...backend import RunsOnNpu
from ...contract import Problem
from ...errors import BackendUnavailable
from ...visible import said
from . import agreement
from .all_gather import AllGather
from .all_to_all import AllToAll
from .exchange import Exchange, Mover, Topology
from .first_call import FirstCall
from .hierarchical import Hierarchical
from .npu import DispatchCombine

__all__ = [
    "AUTO",
    "EXCHANGES",
    "AllGather",
    "AllToAll",
    "DispatchCombine",
    "Exchange",
    "Mover",
    "Topology",
    "automatic",
    "choose",
]

AUTO = "auto"
EXCHANGES: tuple[type[Exchange], ...] = (DispatchCombine, AllGather, AllToAll, Hierarchical)
# ranks from which torch_npu's operators are the first choice: what vllm-ascend does on this chip
DISPATCH_FROM = 16


def automatic(topology: Topology) -> tuple[type[Exchange], ...]:
    """What "auto" tries, in order.

    On NPUs nothing waits for the device where it can be helped. Elsewhere all_to_all, which moves the fewest bytes.
    """
    if not isinstance(topology.backend, RunsOnNpu):
        return (AllToAll,)
    static = (AllGather, AllToAll)
    return (DispatchCombine, *static) if topology.placement.D >= DISPATCH_FROM else static


def choose(name: str, problem: Problem, topology: Topology) -> Mover:
    """The exchange of that name, or with "auto" the first that can; all processes of the group call together.

    Raises:
        ContractError: the processes ask for different things.
        BackendUnavailable: it cannot; the message says why, and what would make it.
    """
    if dist.is_initialized():
        mapping = topology.placement.device_expert_mapping.tolist()
        given = {"placement": mapping, "wire": topology.wire, "nodes": topology.nodes, "timeout": topology.timeout}
        tried = {"exchanges of its backend": [kind.name for kind in automatic(topology)]}
        agreement.check_same(topology.group, exchange=name, problem=problem, **given, **tried)
    rejected: dict[str, str] = {}
    able: list[type[Exchange]] = []
    for kind in automatic(topology) if name == AUTO else (kind for kind in EXCHANGES if kind.name == name):
        if dist.is_initialized():
            reason = agreement.reason_of_any(_why_not(kind, problem, topology), topology.group)
        else:
            reason = kind.why_not(problem, topology)
        if reason is None:
            able.append(kind)
        else:
            rejected[kind.name] = reason
    if not able:
        raise BackendUnavailable(
            f"exchange {name!r} cannot run here", details=[f"{kind}: {reason}" for kind, reason in rejected.items()]
        )
    logger.debug("exchange {}; rejected: {}", able[0].name, rejected or "none")
    if len(able) == 1:
        return able[0].of(problem, topology)
    return FirstCall([partial(kind.of, problem, topology) for kind in able], topology.group)


def _why_not(kind: type[Exchange], problem: Problem, topology: Topology) -> str | None:
    """As kind.why_not; also where that fails: the other processes wait for this one's answer."""
    try:
        return kind.why_not(problem, topology)
    except Exception as error:
        logger.opt(exception=error).debug("exchange {} cannot say whether it runs", kind.name)
        return said(error)
