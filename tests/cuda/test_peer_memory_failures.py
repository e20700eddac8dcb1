"""A rank whose host fails within a call of the kernels: what it and the others get. The kernels are stood in for."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from model_ranks import by_ranks
from ttnn_moe.contract import Experts, Placement, Problem
from ttnn_moe.cuda.combine.channel import Came
from ttnn_moe.cuda.combine.kernel import Stopped
from ttnn_moe.errors import TtnnMoeError
from ttnn_moe.parallel import ExpertParallel
from ttnn_moe.parallel.exchanges import peer_memory
from ttnn_moe.parallel.exchanges.hierarchical import MACHINES
from ttnn_moe.parallel.exchanges.peer_memory import PeerMemoryExchange
from ttnn_moe.parallel.hierarchical.rings import Role
from ttnn_moe.parallel.ranks import Ranks

BF16 = torch.bfloat16
PROBLEM = Problem(8, 4, 2, 64, 32, BF16, D=2)
WAIT = 1.0
"""Seconds that a kernel waits for another rank."""


class Channel:
    """The calls of a rank's kernels: the n-th dispatch of each rank meets the n-th of the others, and so do combines.

    Attributes:
        met: of each launch that met the other rank's: what this rank and the other one sent, the call of a test.
    """

    def __init__(self, ranks: Ranks):
        A, H, K = 16, PROBLEM.H, PROBLEM.K
        ids, count = torch.full((A, K), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        self.came = Came(torch.zeros(A, H, dtype=BF16), ids, torch.zeros(A, K), count)
        self.expert_out = torch.zeros(A, H, dtype=BF16)
        self.alone, self.looks, self.met = False, 0, list[tuple[int, int]]()
        self.sends, self.fails = 0, False
        self._ranks, self._numbers, self._dead, self._seen = ranks, {"dispatch": 0, "combine": 0}, None, None

    def _launch(self, what: str) -> None:
        if self.alone or self._dead:
            return
        number = self._numbers[what] = self._numbers[what] + 1
        own, other = (f"{what}{number}/{rank}" for rank in (self._ranks.rank, 1 - self._ranks.rank))
        self._ranks._store.set(own, str(self.sends))
        until = time.monotonic() + WAIT
        while not self._ranks._store.check([other]):
            if time.monotonic() > until:
                self._dead = Stopped(1 - self._ranks.rank, Role.OUTSIDE, number, self._ranks.rank)
                return
            time.sleep(0.01)
        self.met.append((self.sends, int(self._ranks._store.get(other))))

    def dispatch(self, *_: object) -> Came:
        if self.fails:
            raise RuntimeError("CUDA driver: no launch")
        self._launch("dispatch")
        return self.came

    def combine(self, out: torch.Tensor, *_: object) -> None:
        self._launch("combine")
        out.zero_()

    def look(self) -> None:
        self.looks, self._seen = self.looks + 1, self._dead

    def seen(self) -> Stopped | None:
        return self._seen


def layer_of(ranks: Ranks) -> tuple[ExpertParallel, Channel]:
    channel = Channel(ranks)
    PeerMemoryExchange.why_not = lambda problem, topology: None  # type: ignore[assignment]
    peer_memory._channel_of = lambda problem, topology: channel  # type: ignore[assignment]
    torch.cuda.current_device = lambda: "cpu"
    MACHINES["cpu"] = PeerMemoryExchange
    experts = Experts.dense(torch.zeros(2, 64, 64, dtype=BF16), torch.zeros(2, 64, 32, dtype=BF16))
    placement = Placement.uniform(4, 2, ranks.rank)
    return ExpertParallel(PROBLEM, experts, placement, None, "reference", "hierarchical", BF16), channel


def call(layer: ExpertParallel, dtype: torch.dtype = BF16) -> torch.Tensor:
    return layer(torch.ones(2, 64, dtype=dtype), torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, 2))


def calls(ranks: Ranks, where: str) -> dict[str, Any]:
    """Three calls; rank 0's host fails in the first. What each gave, what met, and the seconds of the last two."""
    layer, channel = layer_of(ranks)
    peer_memory.LOOK = 0.0
    assert layer.kernels is not None
    local, failing = layer.kernels._local, ranks.rank == 0

    def runs(*given: Any, **options: Any) -> torch.Tensor:
        assert local is not None
        if failing and where == "experts":
            raise MemoryError("no room")
        return local(*given, **options)

    layer.kernels._local = runs  # type: ignore[assignment]
    said, begin = [], 0.0
    for n in range(3):
        channel.sends, channel.fails = n, failing and where == "dispatch"
        try:
            call(layer, torch.float16 if failing and where == "arguments" else BF16)
            said.append("ran")
        except (TtnnMoeError, MemoryError, RuntimeError) as error:
            peer = error.report.peer if hasattr(error, "report") else getattr(error, "peer", None)
            said.append((type(error).__name__, peer, str(error)))
        begin, failing = begin or time.monotonic(), False
    return {"said": said, "met": channel.met, "later": time.monotonic() - begin}


@pytest.mark.parametrize(
    "where, error, reason",
    [
        ("experts", "MemoryError", "no room"),
        ("dispatch", "RuntimeError", "no launch"),
        ("arguments", "ContractError", "hidden does not fit"),
    ],
)
def test_a_rank_sends_nothing_after_its_host_failed(where: str, error: str, reason: str, tmp_path: Path) -> None:
    """It would be a call behind: its tokens of one layer would meet those of another, without an error."""
    own, other = by_ranks(calls, 2, tmp_path, where, timeout=20.0)
    for one in (own, other):
        assert all(mine == others for mine, others in one["met"]), one["met"]
    assert own["said"][0][0] == error and own["later"] < WAIT / 2
    for kind, _, text in own["said"][1:]:
        assert kind == "RankStopped" and reason in text and "to fix it: look at " in text
    # the kernels of the others find it, and the next call tells their hosts
    assert other["said"][0] == "ran"
    assert [said[:2] for said in other["said"][1:]] == [("PeerStopped", 0)] * 2


def quiet_calls(ranks: Ranks, how: str) -> tuple[list[str], list[tuple[int, int]], int]:
    """Rank 0's experts fail where a call sends nothing; then both ranks call twice."""
    layer, channel = layer_of(ranks)
    assert layer.kernels is not None
    local, launch = layer.kernels._local, channel._launch

    def fails(*given: Any, **options: Any) -> torch.Tensor:
        raise MemoryError("no room")

    said = []
    if ranks.rank == 0:
        layer.kernels._local = fails  # type: ignore[assignment]
        captures = how == "capture"
        if captures:  # what a graph holds is not launched
            channel._launch = lambda what: None  # type: ignore[method-assign]
            peer_memory.captures = lambda device: True
        with nullcontext() if captures else layer.kernels.alone(), pytest.raises(MemoryError):
            call(layer)
        peer_memory.captures = lambda device: False
        layer.kernels._local, channel._launch = local, launch  # type: ignore[method-assign]
    for _ in range(2):
        call(layer)
        said.append("ran")
    return said, channel.met, channel.looks


@pytest.mark.parametrize("how", ["capture", "alone"])
def test_what_fails_where_nothing_is_sent_ends_no_later_call(how: str, tmp_path: Path) -> None:
    """A capture fails for want of memory; its step then runs without a graph."""
    for said, met, looks in by_ranks(quiet_calls, 2, tmp_path, how, timeout=20.0):
        assert said == ["ran", "ran"] and len(met) == 4
        assert looks <= 1, "every call looks"
