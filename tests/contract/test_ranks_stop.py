"""A rank that stops: what the others raise, and who ends what waits for it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from model_ranks import by_ranks
from ttnn_moe.parallel.ranks import Ranks


def late_work(ranks: Ranks) -> None:
    """Rank 1 raises; then rank 0 does, as one does that goes on with unfinished results."""
    faults, cut = ranks._faults, []
    faults.cut = lambda: cut.append(threading.current_thread() is faults._thread)
    if ranks.rank == 1:
        raise ValueError("of rank 1's own")
    while faults.reported() is None or not cut:
        time.sleep(0.01)
    assert cut == [True]
    raise MemoryError("got 10^18 rows")


def test_what_a_rank_raises_after_another_stopped_names_that_one(tmp_path: Path) -> None:
    late, stopped = by_ranks(late_work, 2, tmp_path, timeout=8.0)
    assert (stopped.kind, stopped.text) == ("ValueError", "of rank 1's own")
    assert (late.kind, late.peer) == ("RankStopped", 1) and "of rank 1's own" in late.text


def left_work(ranks: Ranks, folder: Path) -> None:
    """A rank alone raises, and writes who cut, and whether its heartbeat still ran."""
    faults = ranks._faults
    faults.cut = lambda: (folder / "cut").write_text(f"{faults._thread.is_alive()}")
    raise ValueError("own")


def test_a_rank_that_raises_cuts_once_its_heartbeat_ended(tmp_path: Path) -> None:
    (failed,) = by_ranks(left_work, 1, tmp_path, tmp_path, timeout=8.0)
    assert failed.kind == "ValueError" and (tmp_path / "cut").read_text() == "False"


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
