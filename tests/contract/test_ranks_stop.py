"""A rank that stops: what the others raise, and who ends what waits for it."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from model_ranks import by_ranks
from ttnn_moe.errors import ContractError
from ttnn_moe.parallel.hierarchical import PeerStopped, Report
from ttnn_moe.parallel.hierarchical.rings import Role
from ttnn_moe.parallel.ranks import Ranks, RankStopped
from ttnn_moe.parallel.ranks.faults import Faults
from ttnn_moe.parallel.ranks.turns import Turns


def late_work(ranks: Ranks, kind: type[Exception]) -> None:
    """Rank 1 raises; then rank 0 does."""
    faults, cut = ranks._faults, []
    faults.cut = lambda: cut.append(threading.current_thread() is faults._thread)
    if ranks.rank == 1:
        ranks._store.wait(["begun"])  # rank 0 may still connect to a rank that would be gone
        raise ValueError("of rank 1's own")
    ranks._store.set("begun", "")
    while faults.reported() is None or not cut:
        time.sleep(0.01)
    assert cut == [True]
    raise kind("got 10^18 rows")


def test_what_a_rank_raises_after_another_stopped_names_that_one(tmp_path: Path) -> None:
    """It went on with unfinished results."""
    late, stopped = by_ranks(late_work, 2, tmp_path, MemoryError)
    assert (stopped.kind, stopped.text) == ("ValueError", "of rank 1's own")
    assert (late.kind, late.peer) == ("RankStopped", 1) and "of rank 1's own" in late.text


def test_what_a_rank_refuses_after_another_stopped_stays_its_own(tmp_path: Path) -> None:
    """All ranks get the same input, and each finds what is wrong with it."""
    late, _ = by_ranks(late_work, 2, tmp_path, ContractError)
    assert late.kind == "ContractError"


def left_work(ranks: Ranks, folder: Path) -> None:
    """A rank alone raises, and writes who cut, and whether its heartbeat still ran."""
    faults = ranks._faults
    faults.cut = lambda: (folder / "cut").write_text(f"{faults._thread.is_alive()}")
    raise ValueError("own")


def test_a_rank_that_raises_cuts_once_its_heartbeat_ended(tmp_path: Path) -> None:
    begin = time.monotonic()
    (failed,) = by_ranks(left_work, 1, tmp_path, tmp_path, timeout=120.0)
    assert failed.kind == "ValueError" and (tmp_path / "cut").read_text() == "False"
    assert time.monotonic() - begin < 20, "it waited for a heartbeat to be missed"


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_a_rank_without_a_group_has_no_heartbeat(kind: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would wait for it."""

    def failing(*args: object, **options: object) -> None:
        raise kind("no group")

    monkeypatch.setattr(dist, "init_process_group", failing)
    before = threading.active_count()
    with pytest.raises(kind, match="no group"):
        Ranks(dist.HashStore(), 0, 1)
    assert threading.active_count() == before


def test_an_error_after_the_end_is_no_fault_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store may be gone with rank 0, and no heartbeat goes on."""
    monkeypatch.setattr(Faults, "wait", lambda faults: faults.lost("gone"))
    ranks = Ranks(dist.HashStore(), 0, 1)
    with pytest.raises(RuntimeError, match="no room on the disk") as error, ranks.watched():
        ranks.close()
        raise RuntimeError("no room on the disk")
    assert error.type is RuntimeError


@pytest.mark.parametrize("device, ended", [("cuda", ["abort"]), ("cpu", [])])
def test_a_fault_ends_what_nccl_waits_in(device: str, ended: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    ranks, calls = Ranks(dist.HashStore(), 0, 1, device), []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    ranks.group = SimpleNamespace(abort=lambda: calls.append("abort"))
    ranks._faults.cut_once()
    ranks._faults.end()
    assert calls == ended


def test_a_rank_that_dies_before_there_is_a_group_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch only says that its time is over."""

    def late(*args: object, timeout: timedelta, **options: object) -> None:
        time.sleep(timeout.total_seconds())
        raise dist.DistStoreError("wait timeout")

    store, timeout = dist.HashStore(), 2.0
    dist.PrefixStore("faults", store).set("beat/1", "1")
    monkeypatch.setattr(dist, "init_process_group", late)
    monkeypatch.setattr(Ranks, "compare", lambda *_: None)
    with pytest.raises(RankStopped, match="rank 1 stopped.*no heartbeat for"):
        Ranks(store, 0, 2, timeout=timeout)


def test_a_rank_may_come_as_late_as_the_timeout() -> None:
    """It has no heartbeat before it comes: its machine may read this package from a slow disk."""
    store = dist.HashStore()
    early = Faults(store, 0, 3, 4.0)
    assert early.wait() is None
    store.set("beat/1", "1")
    time.sleep(0.6)
    store.set("beat/2", "1")
    found = early.wait()
    early.end()
    assert found is not None and found.peer == 1 and "no heartbeat" in str(found)


def test_all_ranks_name_the_rank_that_was_reported_first() -> None:
    store = dist.HashStore()
    one, other = (Faults(store, rank, 3, 60.0) for rank in range(2))
    for found in (one.report(2, "of rank 2's own"), other.report(0, "a later one"), other.stopped()):
        assert found is not None and found.peer == 2 and "of rank 2's own" in str(found)
    one.end()
    other.end()


class Kept:
    """A store that another rank keeps, until that rank ends."""

    def __init__(self) -> None:
        self._kept = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
        self.store = dist.TCPStore("127.0.0.1", self._kept[0].port, is_master=False)

    def end(self) -> None:
        self._kept.clear()


def test_a_rank_without_its_store_is_cut() -> None:
    """Rank 0 died, which kept the store: a kernel would wait for it for ever."""
    kept, cut = Kept(), threading.Event()
    faults = Faults(kept.store, 1, 2, 60.0)
    faults.cut = cut.set
    kept.end()
    assert cut.wait(10)
    faults.end()


def test_a_rank_that_loses_its_store_in_a_meeting_names_rank_0() -> None:
    kept = Kept()
    threading.Timer(0.2, kept.end).start()
    with pytest.raises(RankStopped, match="rank 0 stopped, .* the store .* is gone: (?!None)") as stopped:
        Ranks(kept.store, 1, 2)
    assert stopped.value.peer == 0


class Heard:
    """A store; a rank takes `leaves` seconds to say in it that it left, and notes whether its heartbeat runs then."""

    def __init__(self, ranks: Ranks, leaves: float):
        self._ranks, self._store, self._leaves, self.left = ranks, ranks._store, leaves, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: str) -> None:
        if key.startswith("left/"):
            time.sleep(self._leaves)
            self.left += [self._ranks._faults._thread.is_alive(), time.monotonic()]
        self._store.set(key, value)


def closing(ranks: Ranks, comes: float, leaves: float) -> tuple[list[Any], float]:
    ranks._store = heard = Heard(ranks, leaves)
    if ranks.rank == 1:
        time.sleep(comes)
    ranks.close()
    return heard.left, time.monotonic()


@pytest.mark.parametrize(
    "comes, leaves, last, timeout", [(0, 0.5, True, 20.0), (2.5, 0, True, 8.0), (0, 4.0, False, 8.0)]
)
def test_rank_0_leaves_last_but_does_not_wait_for_ever(
    comes: float, leaves: float, last: bool, timeout: float, tmp_path: Path
) -> None:
    """The store goes with it. That is no fault then: a rank that left has no heartbeat."""
    (none, closed), ((beats, left), _) = by_ranks(closing, 2, tmp_path, comes, leaves, timeout=timeout)
    assert none == [] and not beats
    assert (closed > left) == last


def meets_late(ranks: Ranks, within: float | None) -> object:
    """Rank 1 comes to the second meeting after the timeout, and its heartbeat goes on."""
    ranks.timeout = 0.2
    if ranks.rank == 1:
        time.sleep(1)
    return ranks.meet(str(ranks.rank), within)


def test_a_meeting_may_wait_longer_than_the_timeout(tmp_path: Path) -> None:
    """As for ranks that load weights."""
    assert by_ranks(meets_late, 2, tmp_path, 30.0) == [["0", "1"]] * 2


def test_a_rank_that_comes_to_a_meeting_too_late_is_named(tmp_path: Path) -> None:
    failed, _ = by_ranks(meets_late, 2, tmp_path, None)
    assert (failed.kind, failed.peer) == ("RankStopped", 1) and "did not come to meeting 2 in 0.2 s" in failed.text


def waits_in_vain(ranks: Ranks) -> None:
    """Rank 0 sees no progress, though all heartbeats go on."""
    if ranks.rank == 0:
        raise PeerStopped(Report(1, Role.RECEIVER, 3, 0, live=1), 0, 30.0)
    ranks.meet()


def test_no_rank_is_blamed_where_all_live(tmp_path: Path) -> None:
    for failed in by_ranks(waits_in_vain, 2, tmp_path):
        assert (failed.kind, failed.peer) == ("RankStopped", -1) and "no progress in call 3" in failed.text


def test_a_rank_leaves_when_gloo_has_given_up_the_tensors_of_all_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []

    def all_reduce(words: torch.Tensor, op: object, group: object) -> None:
        if not held:  # the first turn's thread is late; the second turn's is not
            held.append(words)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    turns = Turns(None, None, 1.0)
    assert turns.take(3) and turns.take(3)
    late = threading.Timer(0.2, held.clear)
    late.start()
    turns.settle()
    assert not held
    late.join()
