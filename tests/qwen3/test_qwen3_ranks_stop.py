"""A rank that stops, or fails and goes on, while ranks share the bundled checkpoint."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from model_ranks import Failed, by_ranks
from shared_models import NEW, Alone, Later, prompts
from ttnn_moe.models.qwen3 import TINY, Engine, generate, load_model
from ttnn_moe.models.qwen3.checkpoint import Checkpoint
from ttnn_moe.models.qwen3.parallel import load_shared
from ttnn_moe.models.qwen3.parallel.experts import TurnGraphs
from ttnn_moe.models.qwen3.parallel.tensor import TensorQwen3
from ttnn_moe.models.qwen3.runtime.captured import CapturedRunner
from ttnn_moe.models.qwen3.runtime.graphs import DeviceGraphs
from ttnn_moe.models.qwen3.runtime.scheduler import Chunk, Scheduler
from ttnn_moe.models.qwen3.split import Split
from ttnn_moe.models.qwen3.weights import filled
from ttnn_moe.parallel.ranks import Ranks, RankStopped
from ttnn_moe.reference import ReferenceBackend


def test_an_engine_raises_what_a_step_found_on_the_device() -> None:
    checkpoint, split = Checkpoint(TINY), Split("tensor", 2, 0)
    for stopped in (None, RankStopped(1, 0, "it waited in vain")):
        make = partial(TensorQwen3, checkpoint.config, "reference", split, Alone(stopped))
        engine = Engine(filled(checkpoint, make, "reference", "cpu", split=split), rows=1, capacity=16)
        engine.add([1, 2, 3], max_new_tokens=3, stop_ids=())
        assert len(engine.step()) == 1
        with pytest.raises(RankStopped) if stopped else nullcontext():
            engine.step()
        assert (engine._life.error is not None) == (stopped is not None)


def capture_fails(ranks: Ranks) -> list[int]:
    """A request of rank 0, between two captures of its steps: for the first there is no memory. Rank 1 serves."""
    model, failing = load_shared(TINY, ranks, "experts", exchange="all_to_all"), [MemoryError("no graph")]
    made: list[int] = []

    def capture(graphs: TurnGraphs, run: Callable[[], torch.Tensor], inputs: object = None) -> Later:
        if failing:
            for moe in model.shared():
                moe.turn = model.turns.number  # its layers ran, and sent nothing
            raise failing.pop()
        return Later(run)

    DeviceGraphs.capture = capture  # type: ignore[assignment, method-assign]
    if ranks.rank == 0:
        graphs = TurnGraphs.__new__(TurnGraphs)
        graphs._model = model
        engine = Engine(model, rows=2, capacity=64)
        engine.runner = CapturedRunner(model, engine.cache, Chunk(24, 24), graphs)
        engine.scheduler = Scheduler(engine.runner, engine.cache, Chunk(24, 24))
        with pytest.raises(MemoryError, match="no graph"):
            engine.capture()
        engine.add(prompts()[0], max_new_tokens=NEW, stop_ids=())
        while engine.busy:
            made += [token.token for token in engine.step()]
        engine.capture()
    model.leave()
    return made


def test_ranks_stay_in_step_where_a_capture_fails(tmp_path: Path) -> None:
    """The turn was taken, and the other ranks wait for this one's experts."""
    want = generate(load_model(TINY, device="cpu"), prompts()[:1], max_new_tokens=NEW, stop_ids=()).tokens[0]
    assert by_ranks(capture_fails, 2, tmp_path, timeout=12.0) == [want, []]


def bad_work(ranks: Ranks, how: str, exchange: str) -> str:
    """Rank 1 dies or raises in its third step, in the second layer with experts."""
    model = load_shared(TINY, ranks, "experts", exchange=exchange)
    if ranks.rank == 1:
        moe, calls = model.layers[3].mlp, []
        add_experts = moe.add_experts

        def failing(*args: Any) -> torch.Tensor:
            calls.append(1)
            if len(calls) == 3:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("of rank 1's own")
            return add_experts(*args)

        moe.add_experts = failing
    generate(model, [prompts()[ranks.rank]], max_new_tokens=NEW)
    model.leave()
    return "not reached"


TWO_GPUS = (pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"))


@pytest.mark.slow(5)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=TWO_GPUS)])
@pytest.mark.parametrize("exchange", ["all_to_all", "hierarchical"])
@pytest.mark.parametrize("how", ["kill", "raise"])
def test_a_rank_that_stops_in_a_step_is_named(how: str, exchange: str, device: str, tmp_path: Path) -> None:
    size = 4 if exchange == "all_to_all" and device == "cpu" else 2
    results = by_ranks(bad_work, size, tmp_path, how, exchange, timeout=8.0, device=device)
    stopped = results.pop(1)
    assert stopped is None if how == "kill" else stopped.kind == "ValueError", stopped
    for result in results:
        assert isinstance(result, Failed) and (result.kind, result.peer) == ("RankStopped", 1), result
        assert "rank 1 stopped" in result.text and ("of rank 1's own" in result.text) == (how == "raise")


def experts_fail(ranks: Ranks, exchange: str, at: int) -> str:
    """Rank 1 has no memory for its experts, in this call of all."""
    model = load_shared(TINY, ranks, "experts", exchange=exchange)
    moe, calls = ReferenceBackend.moe, []

    def failing(*given: Any) -> None:
        calls.append(1)
        if len(calls) == at:
            raise MemoryError("no room")
        moe(*given)

    if ranks.rank == 1:
        ReferenceBackend.moe = failing  # type: ignore[method-assign]
    generate(model, [prompts()[ranks.rank]], max_new_tokens=NEW)
    model.leave()
    return "not reached"


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("at", [5, 6], ids=["first layer", "last layer"])
def test_a_rank_whose_experts_fail_is_named(at: int, exchange: str, tmp_path: Path) -> None:
    """Behind the last layer the others have NaN, and no message of that rank to wait for."""
    other, own = by_ranks(experts_fail, 2, tmp_path, exchange, at, timeout=8.0)
    assert (own.kind, own.text) == ("MemoryError", "no room")
    assert (other.kind, other.peer) == ("RankStopped", 1) and "MemoryError: no room" in other.text


def bad_sums(ranks: Ranks, how: str) -> str:
    """Rank 1 dies, stands still or raises in a decode step of tensor parallelism."""
    made = []

    def third(token: Any) -> None:
        made.append(token)
        if ranks.rank == 1 and len(made) == 3:
            if how == "raise":
                raise ValueError("of rank 1's own")
            os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)

    generate(load_shared(TINY, ranks, "tensor"), prompts()[:1], max_new_tokens=40, on_token=third)
    return "not reached"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=TWO_GPUS)])
@pytest.mark.parametrize("how", ["kill", "stop", "raise"])
def test_a_rank_that_stops_in_a_sum_is_named(how: str, device: str, tmp_path: Path) -> None:
    timeout, lost = 8.0 if device == "cuda" else 4.0, [1] if how == "stop" else []
    other, stopped = by_ranks(bad_sums, 2, tmp_path, how, timeout=timeout, device=device, lost=lost)
    assert stopped.kind == "ValueError" if how == "raise" else stopped is None
    assert isinstance(other, Failed) and (other.kind, other.peer) == ("RankStopped", 1), other
    assert ("of rank 1's own" in other.text) == (how == "raise")
