"""The roles of dispatch and combine, once: programs that the CI transport runs, a test proves, and kernels mirror.

Combine, of token t of rank c: each rank with a row of it sends the row to the forwarder, the rank of its node that has
c's local index. The forwarder sums its node's rows and sends one partial to c. c sums over nodes. Dispatch is the way
back.
A rank reads its own rows in place, and a rank's own node needs no forwarder.

Every program is a fixed sequence of operations: no branch depends on what it reads. So no order of arrival changes the
order of a sum, and every interleaving can be searched.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .nodes import Nodes
from .rings import WORD, Counter, Counts, Incoming, Operation, Outgoing, Program, Publish, Ring, Role, Wait

Answer = Generator[Operation, Any, Any]


@dataclass(frozen=True)
class Shape:
    """What all ranks agree on: topology, channels, slots of a ring (a power of two)."""

    nodes: Nodes
    channels: int = 1
    slots: int = 4


@dataclass(frozen=True)
class Task:
    """One program of a rank, and the role it plays."""

    role: Role
    program: Program


class CombineData(Protocol):
    """What combine's roles read and write; the values are opaque to them."""

    def own(self, c: int, t: int) -> Any:
        """This rank's row of token t of rank c."""

    def pack(self, value: Any) -> Any: ...

    def unpack(self, slot: Any) -> Any: ...

    def add(self, total: Any, value: Any) -> Any:
        """total is None at first."""

    def finish(self, t: int, total: Any) -> None:
        """total None: no rank has a row of token t."""


class DispatchData(Protocol):
    """What dispatch's roles read and write."""

    def own(self, t: int) -> Any:
        """This rank's token, as a slot holds it."""

    def deliver(self, c: int, t: int, slot: Any) -> None:
        """Token t of rank c has come."""


class Streams:
    """Rings of one rank in one call, made on demand; `counts` continue from call to call.

    Args:
        masks: masks[c][t] of every rank's tokens: the ranks that hold a row of it.
    """

    def __init__(self, shape: Shape, rank: int, masks: Sequence[Sequence[int]], counts: Counts):
        self.shape, self.rank, self.masks, self.counts = shape, rank, masks, counts
        self.nodes = shape.nodes
        self.node, self.local = shape.nodes.place(rank)

    def tokens(self, c: int, channel: int) -> Iterator[int]:
        return iter(range(channel, len(self.masks[c]), self.shape.channels))

    def pairs(self, ranks: Sequence[int], channel: int) -> Iterator[tuple[int, int]]:
        """(t, c) of the tokens of these ranks, ascending."""
        most = max((len(self.masks[c]) for c in ranks), default=0)
        return ((t, c) for t in range(channel, most, self.shape.channels) for c in ranks if t < len(self.masks[c]))

    def here(self, c: int, t: int, node: int) -> list[int]:
        """Local indices, ascending, of the ranks of a node that hold a row."""
        intra = self.nodes.intra
        return [local for local in range(intra) if self.masks[c][t] >> self.nodes.rank(node, local) & 1]

    def out(self, ring: Ring) -> Outgoing:
        return Outgoing(ring, self.shape.slots, self.counts)

    def into(self, ring: Ring) -> Incoming:
        return Incoming(ring, self.counts)

    def coordinate(self, ring: Ring, items: int) -> Program:
        """The coordinator of a ring for so many items more."""
        return coordinate(ring, self.counts[ring], items)

    def inside(self, source: int, target: int, far: int, channel: int) -> Ring:
        """Between two local indices of this rank's node."""
        return Ring(self.nodes.rank(self.node, source), self.nodes.rank(self.node, target), far, channel)

    def between(self, source: int, target: int, channel: int) -> Ring:
        """Between two nodes, of this rank's local index."""
        return Ring(self.nodes.rank(source, self.local), self.nodes.rank(target, self.local), 0, channel)


def combine(shape: Shape, rank: int, masks: Sequence[Sequence[int]], data: CombineData, counts: Counts) -> list[Task]:
    """The tasks of one rank."""
    s = Streams(shape, rank, masks, counts)
    nodes, node, local = s.nodes, s.node, s.local
    tasks: list[Task] = []
    for channel in range(shape.channels):
        tasks.append(Task(Role.SENDER, _send_rows(s, channel, data)))
        tasks.append(Task(Role.FORWARDER, _forward_partials(s, channel, data)))
        tasks.append(Task(Role.RECEIVER, _receive(s, channel, data)))
        for far in range(nodes.inter):
            c = nodes.rank(far, local)
            for other in range(nodes.intra):
                if other != local:
                    items = sum(other in s.here(c, t, node) for t in s.tokens(c, channel))
                    tasks.append(Task(Role.COORDINATOR, s.coordinate(s.inside(other, local, far, channel), items)))
            if far != node:
                items = sum(bool(s.here(rank, t, far)) for t in s.tokens(rank, channel))
                tasks.append(Task(Role.COORDINATOR, s.coordinate(s.between(far, node, channel), items)))
    return tasks


def _send_rows(s: Streams, channel: int, data: CombineData) -> Program:
    """All streams of a channel, in ascending (token, rank): with one order everywhere, no ring waits in a circle."""
    ranks = [c for c in range(s.nodes.R) if s.nodes.place(c)[1] != s.local]
    places = {c: s.nodes.place(c) for c in ranks}
    outs = {c: s.out(s.inside(s.local, other, far, channel)) for c, (far, other) in places.items()}
    for t, c in s.pairs(ranks, channel):
        if s.local in s.here(c, t, s.node):
            yield from outs[c].send(data.pack(data.own(c, t)))


def _sum_node(s: Streams, c: int, t: int, rows: dict[int, Incoming], data: CombineData) -> Answer:
    """The sum over this node's rows, in ascending local index; None where there is none."""
    total = None
    for local in s.here(c, t, s.node):
        if local == s.local:
            value = data.own(c, t)
        else:
            value = data.unpack((yield from rows[local].receive()))
        total = data.add(total, value)
    return total


def _rows_of(s: Streams, far: int, channel: int) -> dict[int, Incoming]:
    locals_ = (local for local in range(s.nodes.intra) if local != s.local)
    return {local: s.into(s.inside(local, s.local, far, channel)) for local in locals_}


def _forward_partials(s: Streams, channel: int, data: CombineData) -> Program:
    """In the senders' order."""
    ranks = [s.nodes.rank(far, s.local) for far in range(s.nodes.inter) if far != s.node]
    rows = {c: _rows_of(s, s.nodes.place(c)[0], channel) for c in ranks}
    outs = {c: s.out(s.between(s.node, s.nodes.place(c)[0], channel)) for c in ranks}
    for t, c in s.pairs(ranks, channel):
        if s.here(c, t, s.node):
            total = yield from _sum_node(s, c, t, rows[c], data)
            yield from outs[c].send(data.pack(total))


def _receive(s: Streams, channel: int, data: CombineData) -> Program:
    rows = _rows_of(s, s.node, channel)
    others = (far for far in range(s.nodes.inter) if far != s.node)
    partials = {far: s.into(s.between(far, s.node, channel)) for far in others}
    for t in s.tokens(s.rank, channel):
        total = None
        for node in range(s.nodes.inter):
            if not s.here(s.rank, t, node):
                continue
            if node == s.node:
                part = yield from _sum_node(s, s.rank, t, rows, data)
            else:
                part = data.unpack((yield from partials[node].receive()))
            total = data.add(total, part)
        data.finish(t, total)


def dispatch(shape: Shape, rank: int, masks: Sequence[Sequence[int]], data: DispatchData, counts: Counts) -> list[Task]:
    """The tasks of one rank."""
    s = Streams(shape, rank, masks, counts)
    nodes, node, local = s.nodes, s.node, s.local
    tasks: list[Task] = []
    for channel in range(shape.channels):
        for far in range(nodes.inter):
            if far == node:
                tasks.append(Task(Role.SENDER, _spread_own(s, channel, data)))
            else:
                tasks.append(Task(Role.SENDER, _send_tokens(s, far, channel, data)))
                tasks.append(Task(Role.FORWARDER, _forward_tokens(s, far, channel, data)))
                c = nodes.rank(far, local)
                items = sum(bool(s.here(c, t, node)) for t in s.tokens(c, channel))
                tasks.append(Task(Role.COORDINATOR, s.coordinate(s.between(far, node, channel), items)))
            for other in range(nodes.intra):
                if other != local:
                    into = s.into(s.inside(other, local, far, channel))
                    c = nodes.rank(far, other)
                    took = [t for t in s.tokens(c, channel) if local in s.here(c, t, node)]
                    tasks.append(Task(Role.RECEIVER, _take(into, c, took, data)))
                    tasks.append(Task(Role.COORDINATOR, s.coordinate(into.ring, len(took))))
    return tasks


def _spread_own(s: Streams, channel: int, data: DispatchData) -> Program:
    outs = {la: s.out(s.inside(s.local, la, s.node, channel)) for la in range(s.nodes.intra) if la != s.local}
    for t in s.tokens(s.rank, channel):
        yield from _spread(s, s.rank, t, data.own(t), outs, data)


def _spread(s: Streams, c: int, t: int, slot: Any, outs: dict[int, Outgoing], data: DispatchData) -> Program:
    for local in s.here(c, t, s.node):
        if local == s.local:
            data.deliver(c, t, slot)
        else:
            yield from outs[local].send(slot)


def _send_tokens(s: Streams, far: int, channel: int, data: DispatchData) -> Program:
    out = s.out(s.between(s.node, far, channel))
    for t in s.tokens(s.rank, channel):
        if s.here(s.rank, t, far):
            yield from out.send(data.own(t))


def _forward_tokens(s: Streams, far: int, channel: int, data: DispatchData) -> Program:
    c, into = s.nodes.rank(far, s.local), s.into(s.between(far, s.node, channel))
    outs = {la: s.out(s.inside(s.local, la, far, channel)) for la in range(s.nodes.intra) if la != s.local}
    for t in s.tokens(c, channel):
        if s.here(c, t, s.node):
            slot = yield from into.receive()
            yield from _spread(s, c, t, slot, outs, data)


def _take(into: Incoming, c: int, took: Sequence[int], data: DispatchData) -> Program:
    for t in took:
        data.deliver(c, t, (yield from into.receive()))


def announce(nodes: Nodes, rank: int, masks: Any, learn: Callable[[int, Any], None], counts: Counts) -> list[Task]:
    """Tasks that give every rank the masks of all, before dispatch. One slot a ring."""
    tasks: list[Task] = []
    for other in range(nodes.R):
        if other != rank:
            out, into = (Ring(*ends, meta=True) for ends in ((rank, other), (other, rank)))
            tasks.append(Task(Role.ANNOUNCER, Outgoing(out, 1, counts).send(masks)))
            tasks.append(Task(Role.RECEIVER, _learn(Incoming(into, counts), learn)))
            tasks.append(Task(Role.COORDINATOR, coordinate(into, counts[into], 1)))
    return tasks


def _learn(into: Incoming, learn: Callable[[int, Any], None]) -> Program:
    learn(into.ring.source, (yield from into.receive()))


def coordinate(ring: Ring, start: int, items: int) -> Program:
    """Give the slots of `items` items back to their producer, each when it is read. start: items of earlier calls."""
    for n in range(1, items + 1):
        yield Wait(Counter.DONE, ring, start + n & WORD)
        yield Publish(Counter.HEAD, ring, start + n & WORD)
