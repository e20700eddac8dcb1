"""Exchanges, the fastest first: the first that can serve a layer does."""

from __future__ import annotations

from loguru import logger

from ...contract import Problem
from ...errors import BackendUnavailable
from .all_to_all import AllToAll
from .exchange import Exchange, Topology
from .hierarchical import Hierarchical
from .npu import DispatchCombine

__all__ = ["AUTO", "EXCHANGES", "Exchange", "Topology", "choose"]

AUTO = "auto"
EXCHANGES: tuple[type[Exchange], ...] = (DispatchCombine, AllToAll, Hierarchical)


def choose(name: str, problem: Problem, topology: Topology) -> Exchange:
    """The exchange of that name, or with "auto" the first that can.

    Raises:
        BackendUnavailable: it cannot; the message says why, and what would make it.
    """
    rejected: dict[str, str] = {}
    for kind in EXCHANGES:
        if name not in (AUTO, kind.name):
            continue
        reason = kind.why_not(problem, topology)
        if reason is None:
            logger.debug("exchange {}; rejected: {}", kind.name, rejected or "none")
            return kind.of(problem, topology)
        rejected[kind.name] = reason
    raise BackendUnavailable(
        f"exchange {name!r} cannot run here", details=[f"{kind}: {reason}" for kind, reason in rejected.items()]
    )
