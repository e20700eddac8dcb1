"""A group of ranks over shared memory: as threads, or as processes of which one may be stopped at any operation."""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from ttnn_moe.contract import Placement
from ttnn_moe.parallel.hierarchical import Group, Nodes, PeerStopped, Shape, Sizes, tree_sum
from ttnn_moe.parallel.hierarchical.rings import Counter, Ring, Role
from ttnn_moe.parallel.hierarchical.shared_memory import SharedMemory, SharedMemoryTransport


@dataclass(frozen=True)
class Case:
    """What all ranks do: in each of `turns`, dispatch and combine, of new inputs. Experts are dealt out, two a rank.

    Attributes:
        tokens: of each rank. in_steps: what combine sums is not contiguous.
    """

    inter: int
    intra: int
    tokens: tuple[int, ...]
    H: int = 16
    K: int = 3
    channels: int = 1
    slots: int = 2
    dtype: torch.dtype = torch.bfloat16
    wire: torch.dtype = torch.bfloat16
    turns: int = 1
    in_steps: bool = False
    first: int = 0
    timeout: float = 20.0

    @property
    def sizes(self) -> Sizes:
        shape = Shape(Nodes(self.inter, self.intra), self.channels, self.slots)
        return Sizes(shape, max(*self.tokens, 1), self.H, self.K, self.dtype, self.wire)

    @property
    def placement(self) -> Placement:
        R = self.inter * self.intra
        return Placement.from_mapping([[2 * R - 1 - r, r] for r in range(R)])

    def inputs(self, rank: int, turn: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """hidden, ids with -1 and ids that no expert has, weights."""
        g = torch.Generator().manual_seed(1000 * turn + rank)
        T, E = self.tokens[rank], self.placement.E
        ids = torch.randint(-1, E + 1, (T, self.K), generator=g, dtype=torch.int32)
        if T > 1:
            ids[0] = -1
        return torch.randn(T, self.H, generator=g).to(self.dtype), ids, torch.rand(T, self.K, generator=g)

    def rows(self, rank: int, turn: int) -> torch.Tensor:
        """[R, T, H]: what each rank makes of this rank's tokens."""
        g = torch.Generator().manual_seed(1000 * turn + 100 + rank)
        return torch.randn(len(self.tokens), self.tokens[rank], self.H, generator=g).to(self.dtype)

    def biases(self, rank: int, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
        g = torch.Generator().manual_seed(1000 * turn + 200 + rank)
        return tuple(torch.randn(self.tokens[rank], self.H, generator=g).to(self.dtype) for _ in range(2))  # type: ignore[return-value]

    def want(self, rank: int, turn: int, masks: torch.Tensor) -> torch.Tensor:
        rows, biases = self.rows(rank, turn), self.biases(rank, turn)
        return tree_sum(rows, masks, self.sizes.shape.nodes, rank, self.wire, biases, dtype=self.dtype)


@dataclass(frozen=True)
class Fault:
    """rank does this at its n-th operation on the transport: "kill", "stall" (past every timeout) or "delay"."""

    rank: int
    kind: str
    at: int


class Counted(SharedMemoryTransport, ABC):
    """Calls `_count` before each operation on a ring."""

    @abstractmethod
    def _count(self, tear: Callable[[], None] = lambda: None) -> None:
        """tear: does half of the operation."""

    def put(self, ring: Ring, item: int, value: torch.Tensor) -> None:
        self._count(lambda: super(Counted, self).put(ring, item, value[: value.numel() // 2]))
        super().put(ring, item, value)

    def read(self, ring: Ring, item: int) -> torch.Tensor:
        self._count()
        return super().read(ring, item)

    def publish(self, counter: Counter, ring: Ring, count: int) -> None:
        self._count()
        super().publish(counter, ring, count)


class Faulty(Counted):
    """Has the fault, and says before it in which call and role (in the file `said`)."""

    def __init__(self, memory: SharedMemory, rank: int, first: int, fault: Fault, timeout: float, said: Path):
        super().__init__(memory, rank, first)
        self._fault, self._timeout, self._said, self._left = fault, timeout, said, fault.at
        self._where = (0, Role.OUTSIDE)

    def _count(self, tear: Callable[[], None] = lambda: None) -> None:
        self._left -= 1
        if self._left:
            return
        if self._fault.kind != "delay":
            self._said.write_text(f"{self._where[0]} {int(self._where[1])}")
        if self._fault.kind == "kill":
            tear()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self._timeout * (2.5 if self._fault.kind == "stall" else 0.2))

    def beat(self, call: int, role: Role, ended: bool = False) -> None:
        super().beat(call, role, ended)
        self._where = (call, role) if not ended else (call + 1, Role.OUTSIDE)


def calls(case: Case, transport: SharedMemoryTransport) -> dict[str, Any]:
    """What one rank does; what each turn dispatched and combined, or the error and the seconds that it took."""
    rank = transport.rank
    group = Group(transport, case.sizes, case.placement, case.timeout, case.first)
    start, turns = time.monotonic(), []
    try:
        for turn in range(case.turns):
            sent = group.dispatch(*case.inputs(rank, turn))
            own = [case.rows(c, turn)[rank] for c in range(len(case.tokens))]
            x = torch.cat([rows[mask >> rank & 1 == 1] for rows, mask in zip(own, sent.meta.masks, strict=True)])
            x = x.repeat_interleave(2, 1)[:, ::2] if case.in_steps else x
            turns.append((sent, group.combine(x, sent.meta, None, *case.biases(rank, turn))))
    except PeerStopped as error:
        took = time.monotonic() - start
        try:
            group.dispatch(*case.inputs(rank))
            again: object = None
        except PeerStopped as second:
            again = second.report
        return {"report": error.report, "text": str(error), "took": took, "again": again}
    return {"turns": turns}


def by_threads(case: Case) -> list[dict[str, Any]]:
    memory = SharedMemory(case.sizes.layout)
    memory.detach_name()
    transports = [SharedMemoryTransport(memory, rank, case.first) for rank in range(len(case.tokens))]
    with ThreadPoolExecutor(len(transports)) as pool:
        return list(pool.map(lambda one: calls(case, one), transports))


def by_processes(case: Case, fault: Fault | None = None) -> tuple[list[dict[str, Any] | None], tuple[int, int] | None]:
    """Results of every rank (None: it died), and the call and role in which the fault came, if it came."""
    context = get_context("fork")  # a start without imports takes milliseconds
    memory = SharedMemory(case.sizes.layout)
    with tempfile.TemporaryDirectory() as folder:
        ranks = range(len(case.tokens))
        started = [context.Process(target=_process, args=(case, r, memory.name, fault, folder)) for r in ranks]
        for process in started:
            process.start()
        deadline = time.monotonic() + 12 * case.timeout + 30
        for process in started:
            process.join(max(deadline - time.monotonic(), 0))
        hung = [process.pid for process in started if process.is_alive()]
        for process in started:
            process.kill()
        memory.detach_name()
        assert not hung, f"{len(hung)} ranks hang: {fault}"
        files = [Path(folder, f"{rank}.pkl") for rank in ranks]
        results = [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]
        said = Path(folder, "said")
        where = tuple(map(int, said.read_text().split())) if said.exists() else None
    return results, where  # type: ignore[return-value]


def _process(case: Case, rank: int, name: str, fault: Fault | None, folder: str) -> None:
    torch.set_num_threads(1)
    memory = SharedMemory(case.sizes.layout, name)
    if fault is not None and fault.rank == rank:
        transport = Faulty(memory, rank, case.first, fault, case.timeout, Path(folder, "said"))
    else:
        transport = SharedMemoryTransport(memory, rank, case.first)
    # all start together: the time that it takes to start a process is no stall
    memory.words[rank, 10] = 1
    while not memory.words[:, 10].all():
        time.sleep(0.002)
    result = calls(case, transport)
    part = Path(folder, f"{rank}.part")
    part.write_bytes(pickle.dumps(result))
    part.rename(Path(folder, f"{rank}.pkl"))
