"""Runs one rank's programs over a transport, in one thread, with a timeout."""

from __future__ import annotations

import time
from collections.abc import Sequence

from .rings import Counter, Operation, Publish, Put, Read, Ring, Role, Wait, reached
from .roles import Task
from .transport import PeerStopped, Report, Transport

IDLE = (0.0001, 0.004)
"""Seconds between two looks at the counters while nothing moves: at first, and at most."""


class Engine:
    """Calls of one rank, in order.

    Args:
        timeout: seconds without any progress of this rank after which it aborts the group.
    """

    def __init__(self, transport: Transport, timeout: float):
        self.transport, self.timeout, self.call = transport, timeout, 0
        self._done: dict[Ring, int] = {}

    def check(self) -> None:
        """Raises PeerStopped if the group is dead."""
        report = self.transport.aborted()
        if report is not None:
            raise PeerStopped(report, self.transport.rank, self.timeout)

    def meet(self) -> list[dict[str, str] | None]:
        """What each rank told, once all have; after the timeout None for those that have not."""
        end = time.monotonic() + self.timeout
        while True:
            self.check()
            told = self.transport.told()
            if None not in told or time.monotonic() > end:
                return told
            time.sleep(IDLE[1])

    def run(self, tasks: Sequence[Task]) -> None:
        """All programs to their end. What fails or interrupts them ends the group: its counters stand anywhere.

        Raises:
            PeerStopped: a rank stopped; every rank of the group raises the same.
        """
        self.check()
        self.call += 1
        try:
            self._run(tasks)
        except PeerStopped:
            raise
        except BaseException:
            me = self.transport.rank
            _, _, role, _ = self.transport.beats()[me]
            self.transport.abort(Report(me, role, self.call, me))
            raise

    def _run(self, tasks: Sequence[Task]) -> None:
        watch = _Watch(self.transport, self.timeout)
        running: list[tuple[Task, Operation]] = []
        idle = IDLE[0]
        for task in tasks:
            self._advance(task, running)
        while running:
            before, running = running, []
            moved = False
            for task, operation in before:
                if self._ready(operation):
                    self._advance(task, running)
                    moved = True
                else:
                    running.append((task, operation))
            self.transport.beat(self.call, before[0][0].role)
            self.check()
            if moved:
                watch.moved()
                idle = IDLE[0]
            elif watch.expired():
                self.transport.abort(watch.report(self.call, [(task.role, op) for task, op in running]))
                self.check()
            else:
                time.sleep(idle)
                idle = min(2 * idle, IDLE[1])
        self.transport.beat(self.call, Role.OUTSIDE, ended=True)

    def _ready(self, operation: Operation) -> bool:
        assert isinstance(operation, Wait)
        if operation.counter is Counter.DONE:
            have = self._done.get(operation.ring)
            return have is not None and reached(have, operation.count)
        return reached(self.transport.counter(operation.counter, operation.ring), operation.count)

    def _advance(self, task: Task, running: list[tuple[Task, Operation]]) -> None:
        """Runs one program up to its next wait that is not met."""
        answer = None
        transport = self.transport
        transport.beat(self.call, task.role)
        while True:
            try:
                operation = task.program.send(answer)
            except StopIteration:
                return
            answer = None
            if isinstance(operation, Wait):
                if not self._ready(operation):
                    running.append((task, operation))
                    return
            elif isinstance(operation, Put):
                transport.put(operation.ring, operation.item, operation.value)
            elif isinstance(operation, Read):
                answer = transport.read(operation.ring, operation.item)
            elif isinstance(operation, Publish):
                if operation.counter is Counter.DONE:
                    self._done[operation.ring] = operation.count
                else:
                    transport.publish(operation.counter, operation.ring, operation.count)


class _Watch:
    """Since when this rank, and each other rank's heartbeat, has not moved."""

    def __init__(self, transport: Transport, timeout: float):
        self._transport, self._timeout = transport, timeout
        now = time.monotonic()
        self._since = now
        self._beats = [beat for beat, *_ in transport.beats()]
        self._heard = [now] * len(self._beats)

    def moved(self) -> None:
        self._since = time.monotonic()

    def expired(self) -> bool:
        now = time.monotonic()
        for rank, (beat, *_) in enumerate(self._transport.beats()):
            if beat != self._beats[rank]:
                self._beats[rank], self._heard[rank] = beat, now
        return now - self._since > self._timeout

    def report(self, call: int, blocked: Sequence[tuple[Role, Operation]]) -> Report:
        """Blames the rank whose heartbeat stopped first, of those that have not ended this call.

        A rank that waits for a stopped one has a heartbeat, so no chain of waits leads to the wrong rank. Where all
        live (they make different calls, or the machine is far too slow), the report says so, and names the rank that
        this one waits for.
        """
        now, me = time.monotonic(), self._transport.rank
        stopped = []
        for rank, (_, its_call, role, ended) in enumerate(self._transport.beats()):
            finished = ended and its_call >= call
            if rank != me and not finished and now - self._heard[rank] > self._timeout / 2:
                where = (Role.OUTSIDE, its_call + 1) if ended or not its_call else (role, its_call)
                stopped.append((self._heard[rank], rank, *where))
        if stopped:
            _, peer, its_role, its_call = min(stopped)
            return Report(peer, its_role, its_call, me)
        role, operation = blocked[0]
        ring = operation.ring
        return Report(ring.source if ring.source != me else ring.target, role, call, me, live=1)
