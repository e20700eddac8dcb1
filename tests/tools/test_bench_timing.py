"""What the benchmark makes of a clock: a fake one, here, so that every number is exact."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ttnn_moe.bench import floor, timing
from ttnn_moe.bench.timing import CpuClock, CudaClock, Spread, Turn, fastest_us_on_device, take_turns


class FakeTime:
    """A clock that only the calls which `spend` returns, and sleep, advance.

    log: what the device was asked for: "record" of an event, "wait" for what came before.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.log: list[str] = []

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def spend(self, *seconds: float) -> Callable[[], Tensor]:
        """A call that takes these seconds, one a call, and the last of them from then on."""
        times = list(seconds)

        def call() -> Tensor:
            self.now += times[0] if len(times) == 1 else times.pop(0)
            return torch.empty(0)

        return call


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    """The time of timing.py, of floor.py and of torch's events."""
    fake = FakeTime()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = fake.now
            fake.log.append("record")

        def synchronize(self) -> None:
            fake.log.append("wait")

        def elapsed_time(self, end: Event) -> float:
            assert fake.log[-1] == "wait", "torch raises where the device has not reached the event"
            return (end.at - self.at) * 1e3  # milliseconds

    for module in (timing, floor):
        monkeypatch.setattr(module, "time", fake)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: fake.log.append("wait"))
    return fake


def clock_of(device: str) -> CpuClock | CudaClock:
    """The GPU's without a GPU."""
    if device == "cpu":
        return CpuClock()
    cuda = CudaClock.__new__(CudaClock)
    cuda._scratch = torch.empty(1)
    return cuda


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_sample_is_the_time_of_a_turn_over_its_calls(device: str, fake: FakeTime) -> None:
    turns = [
        Turn("one", "eager", [fake.spend(7e-6)]),
        Turn("three", "eager", [fake.spend(3e-6), fake.spend(5e-6), fake.spend(10e-6)]),
        Turn("graph", "graph", [fake.spend(1.0)] * 4, replay=fake.spend(8e-6)),
    ]
    clock_of(device).time(turns)
    assert [turn.samples for turn in turns] == [pytest.approx([us], rel=1e-4) for us in (7, 6, 2)]


def test_eager_calls_on_a_device_keep_the_time_of_the_host(fake: FakeTime) -> None:
    turn = Turn("two", "eager", [fake.spend(3e-6), fake.spend(5e-6)])
    turn.run()
    assert turn.host == pytest.approx([3, 5], rel=1e-4)
    CpuClock().time([turn])
    assert not turn.host, "on the CPU it is the same number"


def test_each_turn_follows_a_read_of_other_data(fake: FakeTime) -> None:
    """A graph is handed over while the device reads; the host's time of an eager call must not hide behind that."""
    clock = clock_of("cuda")
    clock._scratch = SimpleNamespace(sum=lambda: fake.log.append("read"))  # type: ignore[union-attr, assignment]
    eager = Turn("eager", "eager", [lambda: fake.log.append("call")])  # type: ignore[list-item, func-returns-value]
    clock.time([eager, Turn("graph", "graph", [torch.empty], replay=lambda: fake.log.append("replay"))])
    assert fake.log == "read wait record call record read record replay record wait".split()


def test_the_round_that_is_no_sample_leaves_no_host_time(fake: FakeTime) -> None:
    turn = Turn("slow at first", "eager", [fake.spend(2e-6, 1e-6)])
    assert take_turns([turn], clock_of("cuda"), 4, 1.0) == 4
    assert turn.host == pytest.approx([1] * 4, rel=1e-3)


def test_a_call_that_waits_for_the_device_is_known_before_its_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []

    def set_mode(mode: str) -> None:
        modes.append(mode)
        if mode == "error":
            warnings.warn("a prototype that does not see every wait", stacklevel=2)

    def fails(words: str) -> Callable[[], Tensor]:
        def call() -> Tensor:
            raise RuntimeError(words)

        return call

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calls = [lambda: torch.empty(0), fails("called a synchronizing operation\nat line 7")]
        assert timing.waits_for_device(calls) == "called a synchronizing operation"
        assert timing.waits_for_device(calls[:1]) is None
        with pytest.raises(RuntimeError, match="out of memory"):
            timing.waits_for_device([fails("out of memory")])
    assert modes == ["error", "default"] * 3


@pytest.mark.parametrize(("rounds", "seconds", "taken"), [(100, 60.0, 20), (15, 60.0, 15), (100, 6.0, 10), (4, 6.0, 4)])
def test_rounds_stay_near_the_seconds_given(rounds: int, seconds: float, taken: int, fake: FakeTime) -> None:
    """A round takes three seconds; the one that finds this out is no sample."""
    turns = [Turn("slow at first", "eager", [fake.spend(2.0, 0.5)]), Turn("other", "eager", [fake.spend(1.0)])]
    assert take_turns(turns, CpuClock(), rounds, seconds) == taken
    assert turns[0].samples == [5e5] * taken and turns[1].samples == [1e6] * taken


def test_the_percentiles_of_a_spread() -> None:
    """The values nearest to a tenth and to nine tenths of the way, in any order."""
    assert Spread.of([float(v * 37 % 100) for v in range(100)]) == Spread(49.5, 10.0, 89.0, 100)
    assert Spread.of([4.0, 1.0, 3.0, 2.0]) == Spread(2.5, 1.0, 4.0, 4)


def test_the_fastest_of_a_graph_of_four_calls(fake: FakeTime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay is four calls; the first replay, and the call before the graph, warm up; each other follows a pause."""
    made: list[None] = []
    replay = fake.spend(4e-6, *[40e-6] * 12, 20e-6, 48e-6)
    replays: list[None] = []

    def run() -> None:
        replays.append(None)
        replay()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=run))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: nullcontext())
    assert fastest_us_on_device(lambda: made.append(None)) == pytest.approx(5.0, rel=1e-4)
    assert len(made) == 1 + 4 and len(replays) == 1 + 20
    assert fake.now == pytest.approx(1000 + 20 * 0.01, abs=0.005)


@pytest.mark.parametrize(
    ("seconds", "calls", "fastest"),
    [([0.04, 0.01, 0.03], 10, 0.01), ([0.375, 0.125, 0.001], 2, 0.125), ([0.625, 0.001], 1, 0.625)],
)
def test_the_fastest_of_ten_calls_or_of_half_a_second(
    seconds: Sequence[float], calls: int, fastest: float, fake: FakeTime
) -> None:
    made: list[None] = []
    spend = fake.spend(*seconds)
    assert floor._fastest_seconds(lambda: (made.append(None), spend())) == pytest.approx(fastest)
    assert len(made) == calls


def test_the_ceiling_of_a_read_is_its_bytes_over_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []
    monkeypatch.setattr(floor, "_fastest_seconds", lambda call: read.append(call()) or 0.5)
    assert floor._read_cpu(4096) == 4096 / 0.5
    assert read == [1024.0], "each of 4096 bytes of fp32 ones is read"


@pytest.mark.parametrize(
    ("dtype", "times", "fastest"),
    [
        (torch.float32, [0.5, 0.25], 0.25),
        (torch.float32, [0.25, 0.5], 0.25),
        (torch.bfloat16, [0.5, 0.25, 0.125], 0.125),
    ],
)
def test_the_ceiling_of_a_product_is_2_n_cubed_over_the_fastest_form(
    dtype: torch.dtype, times: list[float], fastest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, made = list(times), []

    def fake(call: Callable[[], Tensor]) -> float:
        made.append(call())
        return left.pop(0)

    monkeypatch.setattr(floor, "_fastest_seconds", fake)
    assert floor._product("cpu", dtype, 8) == 2 * 8 * 8 * 8 / fastest
    assert not left and {x.shape for x in made} == {(8, 8)}
    assert [x.dtype for x in made] == [dtype, dtype, torch.float32][: len(times)]


def test_ceilings_of_a_gpu_are_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's times are microseconds."""
    times, made, randn, randint = [4.0, 2.0, 16.0], [], torch.randn, torch.randint

    def fastest(call: Callable[[], Tensor]) -> float:
        made.append(call())
        return times.pop(0)

    monkeypatch.setattr(floor, "fastest_us_on_device", fastest)
    monkeypatch.setattr(torch, "randn", lambda *shape, device: randn(*shape))
    monkeypatch.setattr(torch, "randint", lambda *args, device, **rest: randint(*args, **rest))
    reader = SimpleNamespace(streaming_sum=lambda data: data.view(8, -1).sum(1, dtype=torch.int32))
    monkeypatch.setitem(sys.modules, "ttnn_moe.bench.read", reader)
    assert floor._read_cuda(2**16) == 2**16 / 2e-6
    assert floor._product("cuda", torch.float32, 8) == 2 * 8 * 8 * 8 / 16e-6
    assert [tuple(x.shape) for x in made] == [(8,), (4096,), (8, 8)]


@pytest.mark.parametrize(("device", "size", "n"), [("cpu", 2**28, 1024), ("cuda", 2**32, 8192)])
def test_ceilings_are_measured_on_what_the_docs_say(
    device: str, size: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(floor, f"_read_{device}", lambda size: size)
    monkeypatch.setattr(floor, "_product", lambda where, dtype, n: (where, dtype, n))
    found = floor.measure_ceilings(device, torch.bfloat16)
    assert (found.read_bytes_per_s, found.flops_per_s) == (size, (device, torch.bfloat16, n))
