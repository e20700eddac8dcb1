"""The end of Ranks: gloo's threads have given up what they hold, or the process aborts at its exit."""

from __future__ import annotations

import time
from threading import Event, Thread, Timer

import pytest
import torch.distributed as dist
from torch import Tensor

from ttnn_moe.parallel.ranks import turns
from ttnn_moe.parallel.ranks.ranks import Ranks


class Holding:
    """all_reduce of one rank, whose thread holds the tensor until `ends` is set, or for some seconds."""

    def __init__(self, seconds: float):
        self.seconds, self.holds, self.ends = seconds, False, Event()

    def __call__(self, words: Tensor, op: dist.ReduceOp, group: dist.ProcessGroup) -> None:
        self.holds = True
        held = [words]

        def hold() -> None:
            self.ends.wait(self.seconds)
            self.holds = False
            held.clear()

        Thread(target=hold, daemon=True).start()


@pytest.fixture
def ranks() -> Ranks:
    return Ranks(dist.HashStore(), 0, 1)


def test_close_waits_for_the_tensor_of_the_last_turn(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", reduce := Holding(30))
    assert ranks.turns.take(1, False) and reduce.holds
    Timer(0.3, reduce.ends.set).start()
    ranks.close()
    assert not reduce.holds


def test_close_does_not_wait_for_ever(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", Holding(30))
    monkeypatch.setattr(turns, "_SETTLES", 0.1)
    ranks.turns.take(0)
    begin = time.monotonic()
    ranks.close()
    assert time.monotonic() - begin < 10 and not dist.is_initialized()
