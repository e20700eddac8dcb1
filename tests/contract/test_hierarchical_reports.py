"""Which rank a rank blames that waits in vain: by heartbeats that a test makes, on a clock that it moves."""

from __future__ import annotations

import pytest

from ttnn_moe.parallel.hierarchical import PeerStopped, Report
from ttnn_moe.parallel.hierarchical import engine as engines
from ttnn_moe.parallel.hierarchical.rings import Counter, Ring, Role, Wait

TIMEOUT, CALL = 10.0, 3
Place = tuple[int, Role, bool]
"""Of a rank: its call, its role, and whether it ended the call."""
HERE, ENDED = (CALL, Role.FORWARDER, False), (CALL, Role.OUTSIDE, True)


class Ranks:
    """A transport's heartbeats, of rank 0 among others, and the time."""

    def __init__(self, *others: Place):
        self.rank, self.now = 0, 50.0
        self._places = [HERE, *others]
        self._beats = [7] * len(self._places)

    def monotonic(self) -> float:
        return self.now

    def beats(self) -> list[tuple[int, int, int, bool]]:
        return [(beat, *place) for beat, place in zip(self._beats, self._places, strict=True)]

    def after(self, seconds: float, *alive: int) -> None:
        """The time moves, and then these ranks have beaten."""
        self.now += seconds
        for rank in alive:
            self._beats[rank] += 1


def blamed(ranks: Ranks, monkeypatch: pytest.MonkeyPatch, *last_beats: float, ring: Ring | None = None) -> Report:
    """The report after 11 seconds without progress, if ranks 1 and on beat until these seconds."""
    monkeypatch.setattr(engines, "time", ranks)
    watch = engines._Watch(ranks, TIMEOUT)  # type: ignore[arg-type]
    for second in range(1, 12):
        assert not watch.expired()
        ranks.after(1.0, 0, *(rank for rank, last in enumerate(last_beats, 1) if second <= last))
    assert watch.expired()
    return watch.report(CALL, [(Role.RECEIVER, Wait(Counter.TAIL, ring or Ring(1, 0), 1))])


def test_a_rank_that_ended_the_call_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has been silent for longer than rank 2, since it has nothing left to do."""
    ranks = Ranks(ENDED, (CALL, Role.COORDINATOR, False))
    assert blamed(ranks, monkeypatch, 0, 2) == Report(2, Role.COORDINATOR, CALL, reporter=0)


def test_a_rank_that_ended_a_later_call_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks((CALL + 1, Role.OUTSIDE, True), (CALL, Role.SENDER, False))
    assert blamed(ranks, monkeypatch, 0, 2) == Report(2, Role.SENDER, CALL, reporter=0)


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ((CALL - 1, Role.OUTSIDE, True), (Role.OUTSIDE, CALL)),
        ((CALL - 1, Role.SENDER, False), (Role.SENDER, CALL - 1)),
        ((0, Role.OUTSIDE, False), (Role.OUTSIDE, 1)),
        ((CALL + 1, Role.ANNOUNCER, False), (Role.ANNOUNCER, CALL + 1)),
    ],
    ids=["between two calls", "in the call before", "before its first call", "in the next call"],
)
def test_where_the_blamed_rank_stopped(place: Place, told: tuple[Role, int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert blamed(Ranks(ENDED, place), monkeypatch, 0, 0) == Report(2, *told, reporter=0)


@pytest.mark.parametrize(("last", "peer"), [((4, 2, 3), 2), ((2, 2, 3), 1), ((11, 11, 3), 3)])
def test_the_first_that_fell_silent_is_blamed(
    last: tuple[int, ...], peer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others may wait for it."""
    assert blamed(Ranks(HERE, HERE, HERE), monkeypatch, *last).peer == peer


@pytest.mark.parametrize(("ring", "peer"), [(Ring(2, 0), 2), (Ring(0, 1), 1)], ids=["its source", "its target"])
@pytest.mark.parametrize("last", [11, 6], ids=["now", "half a timeout ago"])
def test_where_all_live_the_other_end_of_the_ring_is_blamed(
    ring: Ring, peer: int, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = blamed(Ranks(HERE, HERE), monkeypatch, last, last, ring=ring)
    assert found == Report(peer, Role.RECEIVER, CALL, reporter=0, live=1)
    text = str(PeerStopped(found, 2, TIMEOUT))
    assert text.startswith("no progress in call 3") and "got heartbeats of all ranks, and rank 0 waited 10 s" in text
    assert "every rank's log" in text and "stopped" not in text
