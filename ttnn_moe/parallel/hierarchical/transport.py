"""What moves bytes and counters between ranks: five calls, and what a timeout needs to name the rank that stopped.

Before them, ranks tell each other what they were made for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from ...errors import TtnnMoeError
from .rings import Counter, Ring, Role


class Report(NamedTuple):
    """Why a group is dead: rank peer stopped, in this role of this call (OUTSIDE: it had not entered the call).

    live: no rank fell silent, and the reporter waited in vain for peer, in this role of its own call.
    """

    peer: int
    role: int
    call: int
    reporter: int
    live: int = 0


class PeerStopped(TtnnMoeError, RuntimeError):
    """A rank died or stalled, or all wait, and the group cannot be used again. `report` says which and where."""

    def __init__(self, report: Report, rank: int, timeout: float):
        self.report = report
        role = Role(report.role)
        if report.live:
            super().__init__(
                f"no progress in call {report.call}, and the expert-parallel group of rank {rank} is dead",
                got=f"heartbeats of all ranks, and rank {report.reporter} waited {timeout:g} s for rank {report.peer}, "
                f"as {role.name.lower()}",
                expected="all ranks make the same calls",
                remedy="look in every rank's log for a call that failed, then start all ranks again",
            )
            return
        where = f"call {report.call}, " + ("before it" if role is Role.OUTSIDE else f"as {role.name.lower()}")
        super().__init__(
            f"rank {report.peer} stopped in {where}, and the expert-parallel group of rank {rank} is dead",
            got="it left"
            if report.reporter == report.peer
            else f"no heartbeat of rank {report.peer}; rank {report.reporter} waited {timeout:g} s for progress",
            expected="all ranks make the same calls, within the timeout of each other",
            remedy=f"look at rank {report.peer}'s log first, then start all ranks again",
        )


class Transport(Protocol):
    """One rank's view of its group. counter: TAIL, which lies at a ring's target, or HEAD, at its source."""

    rank: int
    R: int

    def tell(self, facts: Mapping[str, str]) -> None:
        """What this rank was made for, by field: once, before its first call."""

    def told(self) -> list[dict[str, str] | None]:
        """What each rank told; None: nothing yet. Ranks of other sizes understand each other here."""

    def put(self, ring: Ring, item: int, value: Tensor) -> None:
        """uint8 bytes into the slot of an item, at the target."""

    def read(self, ring: Ring, item: int) -> Tensor:
        """A copy of the slot; this rank is the target."""

    def publish(self, counter: Counter, ring: Ring, count: int) -> None:
        """Release: the tail after what was put, the head after what was read."""

    def counter(self, counter: Counter, ring: Ring) -> int:
        """Acquire: the tail or the head as this rank sees it."""

    def abort(self, report: Report) -> None:
        """Tell every rank. The first report that reaches a rank stays."""

    def aborted(self) -> Report | None: ...

    def beat(self, call: int, role: Role, ended: bool = False) -> None:
        """Heartbeat of this rank: it lives, and what it does. Written to its own memory only."""

    def beats(self) -> list[tuple[int, int, int, bool]]:
        """(heartbeats, call, role, ended) of every rank."""
