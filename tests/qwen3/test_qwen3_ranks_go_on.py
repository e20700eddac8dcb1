"""A rank whose step or capture fails, and whose caller goes on, while ranks share the bundled checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from model_ranks import Failed, by_ranks
from shared_models import NEW, Later, prompts
from ttnn_moe.errors import BackendUnavailable
from ttnn_moe.models.qwen3 import TINY, Engine, generate, load_model
from ttnn_moe.models.qwen3.parallel import load_shared
from ttnn_moe.models.qwen3.parallel.experts import TurnGraphs
from ttnn_moe.models.qwen3.runtime.captured import CapturedRunner
from ttnn_moe.models.qwen3.runtime.graphs import Again, DeviceGraphs
from ttnn_moe.models.qwen3.runtime.language_model import BringsGraphs
from ttnn_moe.models.qwen3.runtime.scheduler import Chunk, Scheduler
from ttnn_moe.parallel import ExpertParallel
from ttnn_moe.parallel.ranks import Ranks

FP32 = torch.float32
TIMEOUT = 12.0


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """One process's tokens of two prompts."""
    model = load_model(TINY, device="cpu", dtype=FP32)
    return generate(model, prompts()[:2], max_new_tokens=NEW, stop_ids=()).tokens


def fails_once(owner: Any, name: str, after: bool = False, kind: type[Exception] = MemoryError) -> None:
    """This work of an object has no memory the first time: before it does anything, or after it did all."""
    works, failing = getattr(owner, name), [kind("no room")]

    def work(*given: Any, **options: Any) -> Any:
        found = works(*given, **options) if after or not failing else None
        if failing:
            raise failing.pop()
        return found

    setattr(owner, name, work)


def tokens_of(engine: Engine, prompt: list[int]) -> list[int]:
    made = []
    engine.add(prompt, max_new_tokens=NEW, stop_ids=())
    while engine.busy:
        made += [token.token for token in engine.step()]
    return made


def capture_of_sums_fails(ranks: Ranks, where: str) -> tuple[str, list[int]]:
    """A capture fails on rank 0, and all callers go on. What it raised, and the tokens of a request after that."""
    model = load_shared(TINY, ranks, "tensor", dtype=FP32)
    engine = Engine(model, rows=2, capacity=64)
    graphs = model.graphs() if isinstance(model, BringsGraphs) else Again()
    engine.runner = CapturedRunner(model, engine.cache, Chunk(24, 24), graphs)
    engine.scheduler = Scheduler(engine.runner, engine.cache, Chunk(24, 24))
    if ranks.rank == 0 and where == "a sum":
        fails_once(model.layers[1].attention, "forward")
    if ranks.rank == 0 and where == "the device":
        again = Again.capture

        def capture(graphs: Again, *given: Any) -> Any:
            again(graphs, *given)
            Again.capture = again  # type: ignore[method-assign]
            raise MemoryError("no room")

        Again.capture = capture  # type: ignore[assignment, method-assign]
    said = "nothing"
    try:
        engine.capture()
    except (BackendUnavailable, MemoryError) as error:
        said = f"{type(error).__name__}: {error}"
    return said, tokens_of(engine, prompts()[0])


@pytest.mark.parametrize("where", ["a sum", "the device"])
def test_all_ranks_capture_a_step_or_none_does(where: str, alone: list[list[int]], tmp_path: Path) -> None:
    """Else one would warm up again, and its sums would meet those of the others' real step."""
    begin = time.monotonic()
    for said, tokens in by_ranks(capture_of_sums_fails, 2, tmp_path, where, timeout=TIMEOUT):
        assert said.startswith("BackendUnavailable: a rank cannot capture a step")
        assert "rank 0: MemoryError: no room" in said and "to fix it: leave more memory" in said
        assert tokens == alone[0]
    assert time.monotonic() - begin < TIMEOUT, "a rank waited for the timeout"


def goes_on_after(ranks: Ranks, where: str, kind: type[Exception]) -> list[int]:
    """A step fails on rank 0, whose caller makes another engine for another request."""
    model = load_shared(TINY, ranks, "tensor", dtype=FP32)
    engine = Engine(model, rows=1, capacity=64, memory=1 << 20)
    if ranks.rank == 0:
        fails_once(
            engine.cache if where == "before" else model.layers[1].attention,
            *{"before": ("prefill",), "within": ("forward",)}[where],
            kind=kind,
        )
        with pytest.raises(kind, match="no room"):
            tokens_of(engine, prompts()[0])
        return tokens_of(Engine(model, rows=1, capacity=64, cache=model.new_cache(1, 64, memory=1 << 20)), prompts()[1])
    return tokens_of(engine, prompts()[0])


@pytest.mark.parametrize("kind", [MemoryError, BackendUnavailable])
@pytest.mark.parametrize("where", ["before", "within"])
def test_a_rank_takes_no_step_after_one_that_failed(where: str, kind: type[Exception], tmp_path: Path) -> None:
    """The others wait in a sum of that step: parts of two requests would meet."""
    for result in by_ranks(goes_on_after, 2, tmp_path, where, kind, timeout=TIMEOUT):
        assert isinstance(result, Failed) and (result.kind, result.peer) == ("RankStopped", 0), result
        assert f"{kind.__name__}: no room" in result.text


def engine_of(model: Any, graphs: bool) -> Engine:
    engine = Engine(model, rows=2, capacity=64)
    if graphs:
        own = TurnGraphs.__new__(TurnGraphs)
        own._model = model
        engine.runner = CapturedRunner(model, engine.cache, Chunk(24, 24), own)
        engine.scheduler = Scheduler(engine.runner, engine.cache, Chunk(24, 24))
    return engine


def goes_on_with_experts(ranks: Ranks, where: str, exchange: str) -> list[int]:
    """A step fails on rank 0 behind its turn, and its caller makes another engine for the same request."""
    model = load_shared(TINY, ranks, "experts", dtype=FP32, exchange=exchange)
    if where == "a capture":
        DeviceGraphs.capture = lambda graphs, run, inputs=None: Later(run)  # type: ignore[assignment, method-assign]
    if ranks.rank == 0:
        engine = engine_of(model, where == "a capture")
        if where == "a capture":
            fails_once(engine.runner.steps, "capture")  # type: ignore[attr-defined]
        elif where == "a layer":
            fails_once(model.layers[2].attention, "forward")
        else:  # what follows the last layer
            fails_once(model, "logits")
        with pytest.raises(MemoryError, match="no room"):
            tokens_of(engine, prompts()[0])
    made = tokens_of(engine_of(model, where == "a capture"), prompts()[ranks.rank])
    model.leave()
    return made


@pytest.mark.parametrize(
    "where, exchange",
    [("a layer", "all_to_all"), ("a layer", "hierarchical"), ("the end", "all_to_all"), ("a capture", "all_to_all")],
)
def test_the_others_get_the_experts_of_a_rank_whose_step_failed(
    where: str, exchange: str, alone: list[list[int]], tmp_path: Path
) -> None:
    """Its turn was taken, and they wait in the layers behind."""
    assert by_ranks(goes_on_with_experts, 2, tmp_path, where, exchange, timeout=TIMEOUT) == alone


def compiles(ranks: Ranks) -> tuple[str, list[int]]:
    """Rank 0 cannot compile its experts for turns of a new size, and all callers go on."""
    model, said = load_shared(TINY, ranks, "experts", dtype=FP32, exchange="all_to_all"), "nothing"
    if ranks.rank == 0:
        fails_once(ExpertParallel, "compile")
    try:
        tokens_of(Engine(model, rows=1, capacity=64), prompts()[0])
    except (BackendUnavailable, MemoryError) as error:
        said = f"{type(error).__name__}: {error}"
    made = tokens_of(Engine(model, rows=1, capacity=64), prompts()[0])
    model.leave()
    return said, made


def test_all_ranks_raise_where_one_cannot_compile_its_experts(alone: list[list[int]], tmp_path: Path) -> None:
    """The others would wait in a layer that this rank never makes."""
    for said, made in by_ranks(compiles, 2, tmp_path, timeout=TIMEOUT):
        assert said.startswith("BackendUnavailable: a rank cannot compile") and "rank 0: MemoryError: no room" in said
        assert made == alone[0]


def times_compiled(ranks: Ranks) -> tuple[int, int]:
    """How often layers compiled in a request's steps, and how many layers were made."""
    model, times, works = load_shared(TINY, ranks, "experts", dtype=FP32), [], ExpertParallel.compile

    def compile(layer: ExpertParallel, *given: Any, **options: Any) -> int:
        times.append(layer)
        return works(layer, *given, **options)

    ExpertParallel.compile = compile  # type: ignore[method-assign]
    tokens_of(Engine(model, rows=1, capacity=64), prompts()[0])
    model.leave()
    return len(times), sum(len(moe._prepared) for moe in model.shared())


def test_ranks_meet_once_for_each_size_of_turns(tmp_path: Path) -> None:
    """Each step would wait for another meeting of all."""
    for compiled, made in by_ranks(times_compiled, 2, tmp_path, timeout=TIMEOUT):
        assert compiled == made > 0
