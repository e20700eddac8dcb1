"""Captures between steps: no row of another request changes, and one stream serves all graphs of an engine."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from npu_graphs import Npu
from qwen3_checkpoints import TINY, prompts
from tiny_engines import collect, engine, tiny
from ttnn_moe.kv import paged
from ttnn_moe.kv.bucketed import allocation
from ttnn_moe.kv.step import PrefillStep
from ttnn_moe.models.qwen3 import Engine, Qwen3Moe, generate, load_model
from ttnn_moe.models.qwen3.runtime import decode_graphs, graphs, prefill_graphs
from ttnn_moe.models.qwen3.runtime.captured import CapturedRunner
from ttnn_moe.models.qwen3.runtime.graphs import Again, DeviceGraphs, NpuGraphs
from ttnn_moe.models.qwen3.runtime.scheduler import Chunk, Scheduler


def on_a_gpu(test: Any) -> Any:
    """A test that needs a GPU."""
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")(test))


def captured(kv: str, rows: int = 4) -> Engine:
    """An engine whose steps are "graphs" of the CPU."""
    made = engine(rows, 128, kv=kv)
    made.runner = CapturedRunner(made.model, made.cache, Chunk(24, 24), Again())
    made.scheduler = Scheduler(made.runner, made.cache, Chunk(24, 24))
    return made


def whole_step(forward: Any) -> Any:
    """A graph runs what its capture ran, so a decode step is captured as one: no piece of a prompt is under way."""

    def checked(model: Qwen3Moe, ids: torch.Tensor, cache: Any, step: Any) -> torch.Tensor:
        assert isinstance(step, PrefillStep) or getattr(cache, "_now", None) is None
        return forward(model, ids, cache, step)

    return checked


@pytest.mark.parametrize(
    ("chunk", "alone", "together"),
    [
        (Chunk(60, 1000), [1024, 768, 512, 256, 128, 64], [64]),
        (Chunk(200, 300), [512, 256, 128, 64], [256, 128, 64]),
        (Chunk(300, 300), [512, 256, 128, 64], [512, 256, 128, 64]),
    ],
    ids=str,
)
def test_large_steps_of_prompts_have_no_rows_that_decode(
    chunk: Chunk, alone: list[int], together: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the scheduler makes them: more tokens of one prompt while nobody decodes."""
    made, found = engine(4, 256), list[prefill_graphs.PrefillGraphs]()
    monkeypatch.setattr(prefill_graphs.PrefillGraphs, "capture", lambda self, n, mixed: found.append(self))
    monkeypatch.setattr(made.cache, "why_not_captured_prompts", lambda: None)
    CapturedRunner(made.model, made.cache, chunk, Again()).capture(None)
    kinds = found[0].kinds
    assert [n for n, mixed in kinds if not mixed] == alone and [n for n, mixed in kinds if mixed] == together
    assert len(found) == len(kinds), "each is captured once"


@pytest.mark.parametrize("kv", ["paged", "bucketed"])
@pytest.mark.parametrize("steps", [1, 4, 5, 10])
def test_a_capture_between_steps_changes_no_logit(kv: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After another request ended in the row; in a prompt, in decode steps, and where a full ring moves."""
    monkeypatch.setattr(allocation, "HIGH", ((4, 60),))
    first, second = prompts([4, 90], 500, 7)
    got = []
    for way in ("neither", "captured", "rehearsed"):
        serving, seen = captured(kv), list[torch.Tensor]()
        runner: Any = serving.runner
        step = runner.steps.step
        runner.steps.step = lambda step=step, seen=seen: seen.append(step().clone()) or seen[-1]
        serving.add(first, max_new_tokens=3, stop_ids=())
        collect(serving)
        number = serving.add(second, max_new_tokens=12, stop_ids=())
        tokens = [token.token for _ in range(steps) for token in serving.step()]
        if way == "captured":
            with monkeypatch.context() as patch:
                patch.setattr(Qwen3Moe, "forward", whole_step(Qwen3Moe.forward))
                serving.capture()
            runner.steps.rehearse(4)
        elif way == "rehearsed":  # the step of one row, which the first request captured
            with torch.inference_mode():
                serving.cache.begin([])
            runner.steps.rehearse(1)
        tokens += collect(serving)[number]
        assert len(tokens) == 12
        got.append(torch.cat(seen))
    assert torch.equal(got[0], got[1]) and torch.equal(got[0], got[2])


@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt])
def test_a_capture_that_fails_between_steps_changes_no_token(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that decode go on, and a later capture takes what is missing."""
    serving, text = captured("paged"), prompts([5], 500, 3)[0]
    number = serving.add(text, max_new_tokens=12, stop_ids=())
    tokens = [token.token for _ in range(4) for token in serving.step()]

    def failing(*args: Any) -> None:
        raise kind("no graph")

    with monkeypatch.context() as patch:
        patch.setattr(Qwen3Moe, "forward", failing)
        with pytest.raises(kind, match="no graph"):
            serving.capture()
    serving.capture()
    tokens += collect(serving)[number]
    assert tokens == generate(tiny(), [text], max_new_tokens=12, stop_ids=()).tokens[0]


def test_steps_of_rows_that_decode() -> None:
    """The least that holds them, of those that `capture` takes."""
    made = decode_graphs.buckets(200)
    assert made == [256, 128, 96, 64, 48, 32, 16, 8, 4, 2, 1]
    for rows in range(1, 201):
        assert decode_graphs.bucket_for(rows) == min(n for n in made if n >= rows)
    assert decode_graphs.buckets(33) == [48, 32, 16, 8, 4, 2, 1] and decode_graphs.buckets(1) == [1]


def test_a_step_between_powers_of_two_gives_each_row_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the rows that decode become fewer, one by one."""
    monkeypatch.setattr(decode_graphs, "BETWEEN", (3, 6))
    texts, ran = prompts([4, 9, 2, 7, 5, 3], 500, 11), list[int]()
    made = captured("paged", rows=6)
    made.capture()
    steps: Any = made.runner.steps
    padded = steps._padded
    steps._padded = lambda n: ran.append(n) or padded(n)
    numbers = [made.add(text, max_new_tokens=3 + 2 * i, stop_ids=()) for i, text in enumerate(texts)]
    got = collect(made)
    assert set(ran) == {6, 4, 3, 2, 1}
    for i, (number, text) in enumerate(zip(numbers, texts, strict=True)):
        assert got[number] == generate(tiny(), [text], max_new_tokens=3 + 2 * i, stop_ids=()).tokens[0]


def test_attention_of_every_step_is_divided_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a step, of the positions as they are then; each layer reads the units of its step."""
    first, second = prompts([5, 9], 500, 3)
    want = [
        generate(tiny(), [text], max_new_tokens=new, stop_ids=()).tokens[0] for text, new in ((first, 6), (second, 4))
    ]
    made: list[tuple[torch.Tensor, list[int], int | None]] = []
    read: list[torch.Tensor | None] = []

    def units_of(positions: torch.Tensor, count: torch.Tensor | None, capacity: int, kv_heads: int) -> torch.Tensor:
        made.append((torch.empty(0), positions.tolist(), None if count is None else int(count)))
        return made[-1][0]

    attend = paged.decode_attention
    monkeypatch.setattr(paged, "units_of", units_of)
    monkeypatch.setattr(
        paged, "decode_attention", lambda q, memory, *args: (read.append(memory.units), attend(q, memory, *args))[1]
    )
    serving = captured("paged")
    numbers = [serving.add(first, max_new_tokens=6, stop_ids=())]
    for _ in range(3):
        serving.step()
    numbers.append(serving.add(second, max_new_tokens=4, stop_ids=()))
    got = collect(serving)
    assert [got[n][-3:] for n in numbers] == [tokens[-3:] for tokens in want]
    layers = serving.cache.sizes.layers
    # captures have no valid row; with the second prompt the last layer runs for wanted tokens alone
    ran = [positions for _, positions, count in made if any(positions)]
    assert ran == [[5], [6], [7], [8, 9], [9, 10], [11]] and len(made) == 8
    times = [layers - (positions == [7]) for _, positions, _ in made]
    steps = [units for (units, *_), n in zip(made, times, strict=True) for _ in range(n)]
    assert [units for units in read if units is not None] == steps


def test_all_graphs_warm_up_and_capture_on_one_stream() -> None:
    """A kernel keeps a workspace for each stream that it ran on."""
    device, ran = Streams(), list[int]()

    def run() -> torch.Tensor:
        ran.append(device.current)
        return torch.zeros(1)

    made = DeviceGraphs(device, lambda: SimpleNamespace(replay=lambda: None))
    for _ in range(3):
        made.capture(run)
    assert len(ran) == 6 and len(set(ran)) == 1 and ran[0] != 0, "not the stream of eager steps"
    assert device.waits == [(ran[0], 0), (0, ran[0])] * 3


def test_an_engine_takes_the_stream_of_one_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so its workspaces; those that live at the same time, and other GPUs, have streams of their own."""
    device, current = Streams(), [0]
    for name in ("Stream", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, getattr(device, name))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(graphs, "_FREE", {})
    one, two = (DeviceGraphs(torch.cuda, object) for _ in range(2))
    assert (one._stream.number, two._stream.number) == (1, 2)
    del one
    current[0] = 1
    other = DeviceGraphs(torch.cuda, object)
    current[0] = 0
    again = DeviceGraphs(torch.cuda, object)
    assert (other._stream.number, again._stream.number) == (3, 1)


@on_a_gpu
@pytest.mark.parametrize("kv", ["paged", "bucketed"])
def test_a_capture_between_steps_of_a_gpu_changes_no_token(kv: str) -> None:
    model, made = load_model(TINY, backend="cuda"), []
    for capture in (False, True):
        serving, got = Engine(model, 4, 1024, kv=kv, graphs=True), dict[int, list[int]]()
        serving.add(prompts([9], 500)[0], max_new_tokens=3, stop_ids=())
        collect(serving)
        numbers = [serving.add(text, max_new_tokens=90, stop_ids=()) for text in prompts([300, 40, 7], 500)]
        for _ in range(3):
            for token in serving.step():
                got.setdefault(token.sequence, []).append(token.token)
        if capture:
            serving.capture()
        collect(serving, got)
        made.append([got[number] for number in numbers])
    assert made[0] == made[1]


@on_a_gpu
def test_threads_that_allocate_and_wait_end_no_capture() -> None:
    """A GPU's engines may belong to threads of one process, beside threads that do something else there."""
    texts, stop = prompts([300, 40, 7], 500), threading.Event()

    def busy() -> None:
        sizes = random.Random(0)
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                x = torch.ones(sizes.randint(1, 1 << 20), device="cuda")
                x.sum().item()

    def tokens(kv: str) -> list[list[int]]:
        model = load_model(TINY, backend="cuda")
        made = Engine(model, 4, 1024, kv=kv, graphs=True)
        made.capture()
        return generate(model, texts, max_new_tokens=40, stop_ids=(), engine=made).tokens

    kinds = ["paged", "bucketed", "paged"]
    want = [tokens(kv) for kv in kinds]
    others = [threading.Thread(target=busy) for _ in range(2)]
    for thread in others:
        thread.start()
    try:
        assert [tokens(kv) for kv in kinds] == want
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(tokens, kinds)) == want
    finally:
        stop.set()
        for thread in others:
            thread.join()


@on_a_gpu
@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_logits_of_nan_end_their_request_on_a_gpu(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model, texts = load_model(TINY, backend="cuda"), prompts([5, 9, 3], 500)
    forward, bad = Qwen3Moe.forward, 1

    def damaged(model: Qwen3Moe, ids: torch.Tensor, cache: Any, step: Any) -> torch.Tensor:
        logits = forward(model, ids, cache, step)
        if isinstance(step, PrefillStep):
            return logits
        fails = (step.rows == bad) & (step.positions >= len(texts[bad]) + 3)
        return logits.masked_fill(fails[:, None], float("nan"))

    made = []
    for patched in (False, True):
        if patched:
            monkeypatch.setattr(Qwen3Moe, "forward", damaged)
        serving, got = Engine(model, 4, 256, graphs=True), dict[int, list[Any]]()
        numbers = [
            serving.add(text, max_new_tokens=12, stop_ids=(), temperature=temperature, seed=i)
            for i, text in enumerate(texts)
        ]
        while serving.busy:
            for token in serving.step():
                got.setdefault(token.sequence, []).append(token)
        made.append([got[number] for number in numbers])
    want, found = ([[token.token for token in tokens] for tokens in one] for one in made)
    assert found[0] == want[0] and found[2] == want[2] and found[bad] == [*want[bad][:4], -1]
    assert made[1][bad][-1].finish == "error" and "NaN among the logits" in str(made[1][bad][-1].error)


class Streams:
    """What DeviceGraphs takes of torch.cuda. current: the number of the current stream. waits: (who, for whom)."""

    def __init__(self) -> None:
        self.current, self.made, self.waits = 0, 0, list[tuple[int, int]]()

    def graph_pool_handle(self) -> int:
        return 0

    def Stream(self) -> Any:
        self.made += 1
        return self._of(self.made)

    def current_stream(self) -> Any:
        return self._of(self.current)

    def _of(self, number: int) -> Any:
        return SimpleNamespace(number=number, wait_stream=lambda other: self.waits.append((number, other.number)))

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.number
        yield
        self.current = before

    def graph(self, graph: Any, pool: int, stream: Any) -> Any:
        return self.stream(stream)


@pytest.mark.parametrize("kind", ["npu", "again"])
def test_what_comes_before_a_capture_runs_alone(kind: str) -> None:
    """Ranks that share a model send nothing there, so one that fails is no step apart."""
    within, runs = [False], list[bool]()

    @contextmanager
    def alone() -> Iterator[None]:
        within[0] = True
        yield
        within[0] = False

    def run() -> torch.Tensor:
        runs.append(within[0])
        return torch.zeros(1)

    captured = (NpuGraphs(Npu(), alone) if kind == "npu" else Again(alone)).capture(run)
    assert runs == ([True, False] if kind == "npu" else [True])
    with torch.inference_mode():
        captured.replay()
    assert runs[1:] == [False]
