"""Every interleaving of the roles' programs on small rings, with weak memory and one death, by explicit search.

The programs are those of ttnn_moe/parallel/hierarchical/roles.py: they branch on nothing that they read, so each is a
list of operations, and a state is one position a program plus the rings. The memory is as weak as a release allows:
data that a program put becomes visible at any later moment, in any order, at the latest when that program publishes.
A rank may die between any two operations; what it had put then lands or is lost.

A waiting program leaves once it learns of an abort. A timeout is far longer than any step, so a rank aborts only when
nothing else can happen; it blames the rank whose heartbeat stopped, which is the dead one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ttnn_moe.parallel.hierarchical.rings import Counter, Operation, Program, Publish, Put, Read, Ring, Wait, reached


class Wrong(Exception):
    """A state that no run may reach; the message says which."""


class RingState(NamedTuple):
    tail: int
    head: int
    done: int
    slots: tuple[int, ...]  # the item that lies in each; -1: none yet


class State(NamedTuple):
    at: tuple[int, ...]
    rings: tuple[RingState, ...]
    pending: tuple[tuple[int, int, int], ...]  # (program, ring, item): put and not yet visible
    dead: int  # rank; -1: none


def operations(program: Program) -> list[Operation]:
    """All operations of a program, in order."""
    found, answer = [], None
    try:
        while True:
            found.append(program.send(answer))
    except StopIteration:
        return found


@dataclass
class Search:
    """One group of ranks.

    Args:
        programs: (rank, operations) of each. slots: of a ring. first: counters at the start, as the programs have them.
        deaths: ranks that may die. The rest are what mistakes change: relaxed: a tail does not wait for its data;
        exact: a wait wants its count and no other; deaf: waits for this counter do not learn of an abort.
    """

    programs: Sequence[tuple[int, Sequence[Operation]]]
    slots: int
    first: int = 0
    deaths: Sequence[int] = ()
    relaxed: bool = False
    exact: bool = False
    deaf: Counter | None = None
    states: int = 0
    ring_of: dict[Ring, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for _, ops in self.programs:
            for op in ops:
                self.ring_of.setdefault(op.ring, len(self.ring_of))

    def run(self) -> int:
        """The number of states. Raises Wrong with what is wrong in the first bad one."""
        empty = RingState(self.first, self.first, self.first, (-1,) * self.slots)
        start = State((0,) * len(self.programs), (empty,) * len(self.ring_of), (), -1)
        seen, stack = {start}, [start]
        while stack:
            state = stack.pop()
            steps = self._steps(state)
            if not steps:
                self._check_end(state)
            if state.dead < 0:
                steps += [state._replace(dead=rank) for rank in self.deaths]
            for after in steps:
                if after not in seen:
                    seen.add(after)
                    stack.append(after)
        self.states = len(seen)
        return len(seen)

    def _steps(self, state: State) -> list[State]:
        found = []
        for program, (rank, ops) in enumerate(self.programs):
            if rank != state.dead and state.at[program] < len(ops):
                found += self._step(state, program, ops[state.at[program]])
        for lands in state.pending:
            _, ring, item = lands
            left = tuple(one for one in state.pending if one != lands)
            slots = list(state.rings[ring].slots)
            slots[item % self.slots] = item
            found.append(self._with(state, ring, slots=tuple(slots))._replace(pending=left))
        return found

    def _step(self, state: State, program: int, op: Operation) -> list[State]:
        ring = self.ring_of[op.ring]
        now = state.rings[ring]
        if isinstance(op, Wait):
            have = (now.tail, now.head, now.done)[op.counter]
            met = reached(have, op.count) and (not self.exact or have == op.count or reached(self.first, op.count))
            if not met:
                return []
        elif isinstance(op, Put):
            state = state._replace(pending=tuple(sorted((*state.pending, (program, ring, op.item)))))
        elif isinstance(op, Read):
            lies = now.slots[op.item % self.slots]
            if lies != op.item:
                raise Wrong(f"{op.ring} reads item {lies} for {op.item}")
        elif isinstance(op, Publish):
            if not self.relaxed and any(one[0] == program for one in state.pending):
                return []  # its data lands first
            state = self._with(state, ring, **{("tail", "head", "done")[op.counter]: op.count})
        at = list(state.at)
        at[program] += 1
        return [state._replace(at=tuple(at))]

    def _with(self, state: State, ring: int, **changes: object) -> State:
        rings = list(state.rings)
        rings[ring] = rings[ring]._replace(**changes)
        return state._replace(rings=tuple(rings))

    def _check_end(self, state: State) -> None:
        """Nothing moves: all programs have ended, or all that live wait, see an abort, and leave."""
        for program, (rank, ops) in enumerate(self.programs):
            if rank == state.dead or state.at[program] == len(ops):
                continue
            op = ops[state.at[program]]
            if state.dead < 0:
                raise Wrong(f"no rank died, and rank {rank} waits forever: {op}")
            if isinstance(op, Wait) and op.counter == self.deaf:
                raise Wrong(f"rank {state.dead} died, and rank {rank} never leaves: {op}")


def swapped(ops: Sequence[Operation], first: type, counter: Counter) -> list[Operation]:
    """A mistake: this counter is published before the operation `first` that precedes it."""
    out = list(ops)
    for n in range(len(out) - 1):
        one, two = out[n : n + 2]
        if isinstance(one, first) and isinstance(two, Publish) and two.counter == counter:
            out[n : n + 2] = two, one
    return out


def credited_twice(ops: Sequence[Operation]) -> list[Operation]:
    """A mistake: each credit counts two items."""
    return [replace(op, count=op.count + 1) if _is_credit(op) else op for op in ops]


def kept_back(ops: Sequence[Operation]) -> list[Operation]:
    """A mistake: credit returns in pairs, and an odd last one stays."""
    return [op for n, op in enumerate(ops) if not (_is_credit(op) and n // 2 % 2 == 0)]


def _is_credit(op: Operation) -> bool:
    return isinstance(op, Publish) and op.counter == Counter.HEAD
