"""A rank is delayed, stalled or killed at any operation: no rank hangs, and every error names the right one."""

from __future__ import annotations

import gc
import mmap
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_hierarchical import check

from rank_processes import Case, Counted, Fault, by_processes, calls
from ttnn_moe.parallel.hierarchical import Report
from ttnn_moe.parallel.hierarchical.shared_memory import SharedMemory, SharedMemoryTransport

CASE = Case(2, 2, (5, 4, 3, 6), slots=1, turns=2, timeout=1.0)
LARGE = Case(2, 4, (3, 2, 3, 1, 0, 2, 2, 3), slots=1, timeout=1.2)
OPERATIONS = {CASE: 110, LARGE: 60}
"""About what a rank makes; a fault past them never comes, and all must be right."""


def test_two_reports_at_once() -> None:
    """A rank keeps the report that it saw first, also while another rank reports the same fault."""
    memory = SharedMemory(CASE.sizes.layout)
    ranks = [SharedMemoryTransport(memory, rank) for rank in range(4)]
    early, late = Report(0, 1, 2, reporter=2, live=1), Report(0, 1, 2, reporter=1)
    ranks[2].abort(early)
    assert ranks[3].aborted() == early
    ranks[1].abort(late)
    assert [r.aborted() in (early, late) for r in ranks] == [True] * 4
    assert ranks[3].aborted() == early


def test_memory_that_is_not_attached_to_ends_with_its_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a group that was not made, and where the machine has no room for it."""

    def descriptors() -> list[str]:
        return [one for one in map(os.path.realpath, Path("/proc/self/fd").iterdir()) if "ttnn-moe-ranks" in one]

    def failing(*args: object) -> None:
        raise OSError("no room")

    before = descriptors()
    memory = SharedMemory(CASE.sizes.layout)
    assert descriptors() != before
    del memory
    assert descriptors() == before
    monkeypatch.setattr(mmap, "mmap", failing)
    with pytest.raises(OSError, match="no room"):
        SharedMemory(CASE.sizes.layout)
    assert descriptors() == before


class Interrupted(Counted):
    """Raises at its n-th operation, once."""

    left = 0

    def _count(self, tear: Callable[[], None] = lambda: None) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.mark.parametrize("at", range(1, 12))
def test_a_rank_that_is_interrupted_within_a_call_ends_the_group(at: int) -> None:
    """It may catch that and call again: what is left in its rings belongs to the call before."""
    case = Case(1, 2, (5, 4), slots=8, turns=3)
    memory = SharedMemory(case.sizes.layout)
    memory.detach_name()
    ranks = [Interrupted(memory, 0), SharedMemoryTransport(memory, 1)]
    ranks[0].left = at
    with ThreadPoolExecutor(2) as pool:
        first, other = (pool.submit(calls, case, rank) for rank in ranks)
        with pytest.raises(KeyboardInterrupt):
            first.result()
        report = other.result()["report"]
        assert (report.peer, report.reporter) == (0, 0)
        assert calls(case, ranks[0])["report"] == report


def draw(seed: int) -> tuple[Case, Fault]:
    g = random.Random(seed)
    case = LARGE if g.random() < 0.2 else CASE
    kind = g.choices(["kill", "stall", "delay"], [6, 2, 2])[0]
    return case, Fault(g.randrange(len(case.tokens)), kind, g.randint(1, OPERATIONS[case]))


def group_memory() -> list[str]:
    """Processes that hold memory of groups that this process made, once for each map or descriptor."""
    gc.collect()
    name, found = f"ttnn-moe-ranks-{os.getpid()} ", []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            maps = (process / "maps").read_text()
            open_files = [os.path.realpath(one) for one in (process / "fd").iterdir()]
        except OSError:  # it ended, or is another user's
            continue
        found += [process.name] * (maps.count(name) + sum(name in one for one in open_files))
    return sorted(found)


def check_fault(seed: int) -> str:
    """Runs one; returns what it came to."""
    case, fault = draw(seed)
    held = group_memory()
    results, where = by_processes(case, fault)
    assert len(group_memory()) <= len(held), f"{fault}: memory of the group is left"
    if where is None:
        early = [result["text"] for result in results if result is not None and "text" in result]
        assert not early, f"{fault} did not come, and yet: {early[0]}"
        check(case, results)
        return "all right"
    survivors = [r for rank, r in enumerate(results) if rank != fault.rank or fault.kind == "stall"]
    errors = [r for r in survivors if r is not None and "report" in r]
    assert None not in survivors, f"{fault}: a rank left without an answer"
    for result in errors:
        report = result["report"]
        assert (report.peer, report.call, report.role) == (fault.rank, *where), f"{fault}: {result['text']}"
        assert f"rank {fault.rank} stopped" in result["text"]
        assert result["again"] == report, "the group must stay dead"
        assert result["took"] < 4 * case.timeout + 2
    # a rank that needed nothing more of the dead one may have ended
    return "named" if errors else "nobody waited"


@pytest.mark.slow(30)
def test_faults(fault_runs: int, fault_seed: int) -> None:
    came = [check_fault(seed) for seed in range(fault_seed, fault_seed + fault_runs)]
    assert fault_runs < 15 or came.count("named") > fault_runs // 4
