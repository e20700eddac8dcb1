"""How ranks agree on a step: one all_reduce on the host says how many tokens the busiest has, and whether any stays."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..stopped import RankStopped

PAUSE = (0.001, 0.02)
"""Seconds to wait after a turn in which no rank had a token: at first, and at most."""
_SETTLES = 5.0


class Turns:
    """The steps of ranks that share experts.

    Args:
        control: a process group for tensors on the CPU. group: that of the exchanges. timeout: as Ranks.

    Attributes:
        number: of the turn that this rank took last. most: the most tokens of any rank in it.
        reported: what some rank reported, or None; it asks the store.
    """

    def __init__(self, control: dist.ProcessGroup | None, group: dist.ProcessGroup | None, timeout: float):
        self.group, self.timeout, self.number, self.most = group, timeout, 0, 0
        self._control, self._pause = control, PAUSE[0]
        self.reported: Callable[[], RankStopped | None] = lambda: None
        self._sent: list[weakref.ref[torch.Tensor]] = []  # words that one of gloo's threads may still hold

    def take(self, tokens: int, staying: bool = True) -> bool:
        """Every rank takes the turn. Returns whether any rank has tokens, or stays.

        Args:
            tokens: of this rank in this step. staying: this rank may have more later.
        """
        words = torch.tensor([tokens, int(staying)], dtype=torch.int64, device="cpu")
        self._sent = [*self._held(), weakref.ref(words)]
        dist.all_reduce(words, dist.ReduceOp.MAX, group=self._control)
        self.number += 1
        self.most, going = words.tolist()
        if self.most:
            self._pause = PAUSE[0]
        elif going:
            time.sleep(self._pause)
            self._pause = min(2 * self._pause, PAUSE[1])
        return bool(self.most or going)

    def check(self) -> None:
        """Raise RankStopped where a rank reported that one stopped. It asks the store."""
        found = self.reported()
        if found is not None:
            raise found

    def settle(self) -> None:
        """Wait until gloo's threads have given up the tensors of all turns.

        They take the interpreter's lock for that, after `take` has returned. If the interpreter has ended by then, such
        a thread aborts the process. On a loaded machine one may be a turn behind the other.
        """
        until = time.monotonic() + _SETTLES
        while self._held() and time.monotonic() < until:
            time.sleep(PAUSE[0])

    def _held(self) -> list[weakref.ref[torch.Tensor]]:
        return [words for words in self._sent if words() is not None]
