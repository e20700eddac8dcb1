"""The roles of dispatch and combine: no interleaving of small groups reads wrong data, stops, or outlives a death."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import pytest

from ring_search import Search, Wrong, credited_twice, kept_back, operations, swapped
from ttnn_moe.parallel.hierarchical import roles
from ttnn_moe.parallel.hierarchical.nodes import Nodes
from ttnn_moe.parallel.hierarchical.rings import WORD, Counter, Operation, Put, Read, Role


class Nothing:
    """Data for programs whose operations alone matter."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


CASES = {
    # inter x intra, masks of each rank's tokens
    "two ranks of a node, both ways": (1, 2, [[2, 2], [1]]),
    "two nodes of one rank": (2, 1, [[3, 2], [1]]),
    "three ranks of a node, one takes": (1, 3, [[6, 7], [], []]),
    "three nodes of one rank, one takes": (3, 1, [[6, 6], [], []]),
    "two nodes of two, the sender, its forwarder, the receiver": (2, 2, [[12, 8], [], [], []]),
    "two nodes of two, both forward": (2, 2, [[12], [], [3], []]),
    "three ranks of a node, two take": (1, 3, [[6], [5], []]),
    "no token": (1, 2, [[], []]),
}


def programs(call: str, inter: int, intra: int, masks: Sequence[Sequence[int]], slots: int, first: int = 0):
    nodes = Nodes(inter, intra)
    shape, found = roles.Shape(nodes, 1, slots), []
    for rank in range(nodes.R):
        if call == "announce":
            tasks = roles.announce(nodes, rank, None, lambda *_: None, defaultdict(lambda: first))
        else:
            tasks = getattr(roles, call)(shape, rank, masks, Nothing(), defaultdict(lambda: first))
        found += [(rank, task.role, operations(task.program)) for task in tasks]
    return [one for one in found if one[2]]


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("call", ["combine", "dispatch"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_interleaving_ends_with_the_right_data(case: tuple, call: str, slots: int) -> None:
    inter, intra, masks = case
    ran = [(rank, ops) for rank, _, ops in programs(call, inter, intra, masks, slots)]
    deaths = range(inter * intra)
    assert Search(ran, slots, deaths=deaths).run() < 300_000


def test_masks_reach_every_rank() -> None:
    ran = [(rank, ops) for rank, _, ops in programs("announce", 1, 2, [], 1)]
    Search(ran, 1, deaths=(0, 1)).run()


def test_counters_wrap_around() -> None:
    first = WORD  # the second item has number 0
    ran = [(rank, ops) for rank, _, ops in programs("combine", 1, 2, [[2, 2, 2], []], 2, first)]
    assert Search(ran, 2, first, deaths=(0, 1)).run() > 50


def unchanged(ops: Sequence[Operation]) -> Sequence[Operation]:
    return ops


MISTAKES: dict[str, tuple[Role, Callable, dict, str]] = {
    "tail before data": (Role.SENDER, lambda ops: swapped(ops, Put, Counter.TAIL), {}, "reads item"),
    "tail without release": (Role.SENDER, unchanged, {"relaxed": True}, "reads item"),
    "credit before the read": (Role.RECEIVER, lambda ops: swapped(ops, Read, Counter.DONE), {}, "reads item"),
    "credit twice": (Role.COORDINATOR, credited_twice, {}, "reads item"),
    "last credit kept": (Role.COORDINATOR, kept_back, {}, "waits forever"),
    "lost wake-up: a wait for one exact count": (Role.SENDER, unchanged, {"exact": True}, "waits forever"),
    "a wait for credit that hears no abort": (Role.SENDER, unchanged, {"deaf": Counter.HEAD}, "never leaves"),
    "a wait for data that hears no abort": (Role.SENDER, unchanged, {"deaf": Counter.TAIL}, "never leaves"),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_search_finds_planted_mistakes(mistake: tuple[Role, Callable, dict, str]) -> None:
    role, change, options, what = mistake
    slots = 2 if options.get("exact") else 1
    found = programs("combine", 1, 2, [[2, 2, 2], []], slots)
    ran = [(rank, change(ops) if of == role else ops) for rank, of, ops in found]
    deaths = (0, 1) if "deaf" in options else ()
    with pytest.raises(Wrong, match=what):
        Search(ran, slots, deaths=deaths, **options).run()


def test_search_finds_rings_that_wait_in_a_circle() -> None:
    """Senders 2 and 3 serve receivers 0 and 1: in one order all end; where each starts with its own, both stop."""
    found = programs("combine", 1, 4, [[12] * 3, [12] * 3, [], []], 1)
    ran = [(rank, ops) for rank, _, ops in found]
    Search(ran, 1).run()

    def one_after_the_other(rank: int, role: Role, ops: Sequence[Operation]) -> Sequence[Operation]:
        return sorted(ops, key=lambda op: op.ring.target * (1 if rank == 2 else -1)) if role is Role.SENDER else ops

    with pytest.raises(Wrong, match="waits forever"):
        Search([(one[0], one_after_the_other(*one)) for one in found], 1).run()
