"""Rings between two ranks, and the operations that roles make on them.

A ring has one producer and one consumer. Counters only grow, modulo 2^32, and outlive a call: nothing is reset.

| counter | lies at | written by | says |
|---|---|---|---|
| tail | target | producer, after the slot's data (release) | items put |
| done | target, local | consumer, after it read the slot | items read |
| head | source | coordinator of the target (release) | items whose slots are free again |
"""

from __future__ import annotations

from collections.abc import Generator, MutableMapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

WORD = (1 << 32) - 1


class Counter(IntEnum):
    """Counters of a ring: items put, slots given back, items that the receiver has read."""

    TAIL = 0
    HEAD = 1
    DONE = 2


class Role(IntEnum):
    """What a rank does; an error names one as the phase. OUTSIDE: it is in no call."""

    OUTSIDE = 0
    SENDER = 1
    FORWARDER = 2
    RECEIVER = 3
    COORDINATOR = 4
    ANNOUNCER = 5


@dataclass(frozen=True)
class Ring:
    """From rank source to rank target. far: of a ring inside a node, the node at the other end of its stream.

    meta: the ring of masks, one a pair of ranks; its channel is 0.
    """

    source: int
    target: int
    far: int = 0
    channel: int = 0
    meta: bool = False


@dataclass(frozen=True)
class Wait:
    """Until the counter is at least count."""

    counter: Counter
    ring: Ring
    count: int


@dataclass(frozen=True)
class Put:
    """Data into the slot of an item. The target may see it in any order, until the tail is published."""

    ring: Ring
    item: int
    value: Any = None


@dataclass(frozen=True)
class Read:
    """A copy of the slot of an item; the answer to this operation."""

    ring: Ring
    item: int


@dataclass(frozen=True)
class Publish:
    """A counter, after everything that this program did before (release)."""

    counter: Counter
    ring: Ring
    count: int


Operation = Wait | Put | Read | Publish
Program = Generator[Operation, Any, None]


def reached(counter: int, count: int) -> bool:
    """Whether a counter is at least count, modulo 2^32."""
    return (counter - count) & WORD <= WORD >> 1


Counts = MutableMapping[Ring, int]
"""Items that each ring of a rank has carried, from call to call, modulo 2^32. Rings that it lacks start somewhere."""


class Outgoing:
    """The producer's end of a ring of so many slots, a power of two."""

    def __init__(self, ring: Ring, slots: int, counts: Counts):
        self.ring, self.slots, self.counts = ring, slots, counts

    def send(self, value: Any) -> Program:
        item = self.counts[self.ring]
        yield Wait(Counter.HEAD, self.ring, item + 1 - self.slots & WORD)
        yield Put(self.ring, item, value)
        self.counts[self.ring] = item + 1 & WORD
        yield Publish(Counter.TAIL, self.ring, item + 1 & WORD)


class Incoming:
    """The consumer's end of a ring."""

    def __init__(self, ring: Ring, counts: Counts):
        self.ring, self.counts = ring, counts

    def receive(self) -> Generator[Operation, Any, Any]:
        """Wait for the ring's next item, read it, and count it as read: returns the item."""
        item = self.counts[self.ring]
        yield Wait(Counter.TAIL, self.ring, item + 1 & WORD)
        value = yield Read(self.ring, item)
        self.counts[self.ring] = item + 1 & WORD
        yield Publish(Counter.DONE, self.ring, item + 1 & WORD)
        return value
