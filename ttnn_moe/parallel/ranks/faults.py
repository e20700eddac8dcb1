"""Which rank stopped: heartbeats and reports in the store of torch.distributed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

from loguru import logger
from torch.distributed import Store

from ..stopped import RankStopped

BEAT = 0.5
"""Seconds between two heartbeats of a rank."""
PART = 4
"""A rank whose heartbeat is silent for timeout / PART counts as stopped: a loaded machine delays some."""
_REPORT = "report"


class Faults:
    """One rank's heartbeat, and its view of the others'.

    Args:
        store: that all ranks see. rank, size: of this process, and how many there are. timeout: of Ranks.

    Attributes:
        cut: called once, by the heartbeat's thread when it finds that a rank stopped, or by a rank that leaves after
            an error. It ends what waits for the rank.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: float):
        self.rank, self.silence = rank, timeout / PART
        self.cut: Callable[[], None] | None = None
        self._store, self._peers = store, [peer for peer in range(size) if peer != rank]
        self._heard: dict[int, float] = {}  # since a peer's first heartbeat: until then it has not come
        self._beats = dict.fromkeys(self._peers, b"")
        self._ended = threading.Event()
        self._lost: str | None = None
        self._thread = threading.Thread(target=self._beat, name="ttnn_moe heartbeat", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """No heartbeat any more."""
        self._ended.set()
        self._thread.join(12 * BEAT)  # a loaded machine delays a beat in progress

    def cut_once(self) -> None:
        """See cut."""
        cut, self.cut = self.cut, None
        if cut is not None:
            cut()

    def report(self, peer: int, why: str) -> RankStopped:
        """Tell all ranks that this one stopped. The first report stays, and all ranks raise it."""
        try:
            said = self._store.compare_set(_REPORT, "", json.dumps([peer, why[:2000]]))
            peer, why = json.loads(said)
        except Exception as error:  # the store went away with the process that keeps it
            logger.debug("the store of the ranks is gone: {}", error)
        return RankStopped(peer, self.rank, why)

    def lost(self, why: str) -> RankStopped:
        """The error of a rank that finds no store."""
        self._lost = self._lost or why
        return RankStopped(
            0, self.rank, f"the store of torch.distributed, which rank 0 or torchrun keeps, is gone: {self._lost}"
        )

    def reported(self) -> RankStopped | None:
        """What some rank reported."""
        try:
            if self._store.check([_REPORT]):
                return RankStopped(*self._report_of(self._store.get(_REPORT)))
        except Exception as error:
            self._lost = self._lost or str(error)
        return None

    def stopped(self) -> RankStopped | None:
        """The rank that a report names, or whose heartbeat stopped first; None: all live."""
        found = self.reported()
        if found is not None:
            return found
        if self._lost is not None:
            return self.lost(self._lost)
        heard, peer = min(((at, peer) for peer, at in list(self._heard.items())), default=(time.monotonic(), -1))
        silent = time.monotonic() - heard
        return self.report(peer, f"no heartbeat for {silent:.1f} s") if silent > self.silence else None

    def wait(self) -> RankStopped | None:
        """As stopped, but first gives a heartbeat that just stopped the time to be missed."""
        until = time.monotonic() + self.silence + 2 * BEAT
        while (found := self.stopped()) is None and time.monotonic() < until:
            time.sleep(BEAT / 10)
        return found

    def _report_of(self, said: bytes) -> tuple[int, int, str]:
        peer, why = json.loads(said)
        return peer, self.rank, why

    def _beat(self) -> None:
        number, told = 0, False
        while not self._ended.wait(BEAT if number else 0):
            number += 1
            try:
                self._store.set(f"beat/{self.rank}", str(number))
                for peer in self._peers:
                    key = f"beat/{peer}"
                    beat = self._store.get(key) if self._store.check([key]) else b""
                    if beat != self._beats[peer]:
                        self._beats[peer], self._heard[peer] = beat, time.monotonic()
            except Exception as error:
                self._lost = self._lost or str(error)
            if not told and (found := self.stopped()) is not None:
                told = True  # a kernel that waits for the rank may never return to say it
                logger.error("{}", found)
                self.cut_once()
            if self._lost is not None:
                return
