"""Transport of processes on one host, over shared memory: what CI runs. Linux.

The memory has no name (memfd), so no crash leaves any behind: it ends with the last process that maps it.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...errors import ContractError
from ...visible import shown
from .nodes import MOST, Nodes
from .rings import Counter, Ring, Role
from .transport import Report

SAID = 512
"""Bytes for what a rank tells: their number, then JSON."""
_MEMFD = "ttnn-moe-ranks-"
FRONT = MOST * MOST * SAID
"""Bytes before the parts of the ranks: what each tells, at the same place whatever the layout."""


@dataclass(frozen=True)
class Layout:
    """Bytes of one rank's part: counters, then slots. The same on every rank.

    Args:
        slot: bytes of a slot; a multiple of 16. meta_slot: of a slot of masks.
    """

    nodes: Nodes
    channels: int
    slots: int
    slot: int
    meta_slot: int

    WORDS = 16
    """Words before the counters: heartbeats, call, role, ended, then its own report (first: 1 when it is whole)."""

    @property
    def rings(self) -> int:
        """Rings into one rank: of its node, of its local index, of masks."""
        nodes = self.nodes
        return (nodes.intra * nodes.inter + nodes.inter) * self.channels + nodes.R

    @property
    def data_rings(self) -> int:
        """Rings that hold tokens or rows; the others hold masks."""
        return self.rings - self.nodes.R

    def index(self, ring: Ring, end: int) -> int:
        """Number of a ring among those of one rank; end: the rank at its other end."""
        nodes = self.nodes
        node, local = nodes.place(end)
        if ring.meta:
            return self.data_rings + end
        if nodes.place(ring.source)[0] == nodes.place(ring.target)[0]:
            return (local * nodes.inter + ring.far) * self.channels + ring.channel
        return (nodes.intra * nodes.inter + node) * self.channels + ring.channel

    @property
    def counters(self) -> int:
        """int64 words: status, tails, heads; whole cache lines."""
        return -(-(self.WORDS + 2 * self.rings) // 8) * 8

    @property
    def bytes(self) -> int:
        return self.counters * 8 + self.data_rings * self.slots * self.slot + self.nodes.R * self.meta_slot


class SharedMemory:
    """The memory of one group. `name` is what other processes attach by while its maker lives.

    A rank of another layout attaches too. It shares `said` only, so that all ranks can tell what differs.
    """

    _descriptor: int | None = None

    def __init__(self, layout: Layout, name: str | None = None):
        if not isinstance(layout, Layout):
            raise ContractError("layout is no Layout", got=shown(layout), expected="the layout of a Sizes")
        self.layout, size = layout, FRONT + layout.bytes * layout.nodes.R
        descriptor = os.memfd_create(f"{_MEMFD}{os.getpid()}") if name is None else _opened(name)
        try:
            if name is None:
                os.ftruncate(descriptor, size)
            self.name = name or f"/proc/{os.getpid()}/fd/{descriptor}"
            found = os.fstat(descriptor).st_size
            if found < FRONT:
                raise _no_memory(f"{found} bytes at {self.name}", f"more than {FRONT} bytes")
            self._map = mmap.mmap(descriptor, found)
            self._descriptor = descriptor if name is None else None
        finally:
            if self._descriptor is None:
                os.close(descriptor)
        whole = np.frombuffer(self._map, dtype=np.uint8)
        self.said = whole[:FRONT].reshape(-1, SAID)
        parts = whole[FRONT:] if found == size else np.zeros(size - FRONT, dtype=np.uint8)
        self.parts = parts.reshape(layout.nodes.R, layout.bytes)
        self.words = self.parts[:, : layout.counters * 8].view(np.int64)

    def detach_name(self) -> None:
        """Once every rank has attached: no further process can."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    __del__ = detach_name  # where ranks failed before all had attached


def _opened(name: str) -> int:
    """A descriptor of the memory of that name. A file of anybody else is not opened: ranks would write into it."""
    try:
        target = os.readlink(name)
        if target.startswith(f"/memfd:{_MEMFD}"):
            return os.open(name, os.O_RDWR)
    except (OSError, TypeError, ValueError) as error:  # also a descriptor, or a name with a zero in it
        raise _no_memory(f"{shown(name)}: {error}", f"a link to /memfd:{_MEMFD}...") from error
    raise _no_memory(f"{shown(name)}, a link to {shown(target)}", f"a link to /memfd:{_MEMFD}...")


def _no_memory(got: str, expected: str) -> ContractError:
    return ContractError(
        "this is no memory of a group",
        got=got,
        expected=expected,
        remedy="attach by the name of another rank's SharedMemory, while that rank lives",
    )


class SharedMemoryTransport:
    """See transport.Transport. A store of one int64 is whole, and x86 keeps the order of stores."""

    def __init__(self, memory: SharedMemory, rank: int, first: int = 0):
        self.rank, self.R = rank, memory.layout.nodes.R
        self._memory, self._layout = memory, memory.layout
        self._report: Report | None = None
        if first:  # of tests: counters about to wrap around
            start = Layout.WORDS
            memory.words[rank, start : start + 2 * self._layout.rings] = first

    def _slot(self, ring: Ring, item: int) -> np.ndarray:
        layout = self._layout
        at = layout.counters * 8
        if ring.meta:
            at += layout.data_rings * layout.slots * layout.slot + ring.source * layout.meta_slot
            size = layout.meta_slot
        else:
            at += (layout.index(ring, ring.source) * layout.slots + item % layout.slots) * layout.slot
            size = layout.slot
        return self._memory.parts[ring.target, at : at + size]

    def _word(self, counter: Counter, ring: Ring) -> tuple[int, int]:
        layout = self._layout
        if counter is Counter.TAIL:
            return ring.target, layout.WORDS + layout.index(ring, ring.source)
        return ring.source, layout.WORDS + layout.rings + layout.index(ring, ring.target)

    def tell(self, facts: Mapping[str, str]) -> None:
        words, said = json.dumps(facts).encode(), self._memory.said[self.rank]
        said[8 : 8 + len(words)] = np.frombuffer(words, dtype=np.uint8)
        said[:8].view(np.int64)[0] = len(words)

    def told(self) -> list[dict[str, str] | None]:
        found: list[dict[str, str] | None] = []
        for said in self._memory.said[: self.R]:
            n = int(said[:8].view(np.int64)[0])
            found.append(json.loads(said[8 : 8 + n].tobytes()) if n else None)
        return found

    def put(self, ring: Ring, item: int, value: Tensor) -> None:
        self._slot(ring, item)[: value.numel()] = value.numpy()

    def read(self, ring: Ring, item: int) -> Tensor:
        return torch.from_numpy(self._slot(ring, item).copy())

    def publish(self, counter: Counter, ring: Ring, count: int) -> None:
        self._memory.words[self._word(counter, ring)] = count

    def counter(self, counter: Counter, ring: Ring) -> int:
        return int(self._memory.words[self._word(counter, ring)])

    def abort(self, report: Report) -> None:
        # two ranks may report at once, so each writes its own words only, and a reader keeps the first it sees
        word = self._memory.words[self.rank]
        word[5:10] = report
        word[4] = 1

    def aborted(self) -> Report | None:
        """The first report that a rank wrote; None while no rank has stopped."""
        if self._report is None:
            # a copy: a rank may report while numpy counts
            for reporter in self._memory.words[:, 4].copy().nonzero()[0]:
                self._report = Report(*map(int, self._memory.words[reporter, 5:10]))
                break
        return self._report

    def beat(self, call: int, role: Role, ended: bool = False) -> None:
        word = self._memory.words[self.rank]
        word[1], word[2], word[3] = call, role, ended
        word[0] += 1

    def beats(self) -> list[tuple[int, int, int, bool]]:
        return [(int(w[0]), int(w[1]), int(w[2]), bool(w[3])) for w in self._memory.words[:, :4]]
