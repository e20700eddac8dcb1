"""Graphs whose capture belongs to a step of all ranks: an engine's capture takes those steps with padding only."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ttnn_moe.models.qwen3.runtime.captured import CapturedRunner
from ttnn_moe.models.qwen3.runtime.graphs import Again, Captured
from ttnn_moe.models.qwen3.runtime.scheduler import Chunk


class Late(Again):
    """begun: tokens of each step. busiest: rows of another rank, which a step takes too."""

    early = False

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.made, self.busiest = list[int](), 0, 1

    def begin(self, tokens: int, most: int) -> int | None:
        self.begun.append(tokens)
        bound = max(tokens, self.busiest)
        return bound if bound <= most else None

    def capture(self, run: Callable[[], Tensor], inputs: Any = None) -> Captured:
        self.made += 1
        return super().capture(run, inputs)


class Next:
    """A model whose next token is the last one plus 1. counts: valid rows of each pass."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.counts = list[int]()

    def __call__(self, ids: Tensor, cache: object, step: Any) -> Tensor:
        self.counts.append(1 if step.num_tokens is None else int(step.num_tokens))
        return torch.nn.functional.one_hot((ids + 1) % 16, 16).float()


@torch.inference_mode()
def test_every_size_is_captured_before_rows_come() -> None:
    cache = SimpleNamespace(rows=3, capacity=8, spare=0, moves=False, divided=lambda step: step)
    cache.why_not_captured_prompts, cache.replay_inputs = lambda: "not here", lambda n: None
    model, graphs, seen = Next(), Late(), list[tuple[int, int]]()
    runner: Any = CapturedRunner(model, cache, Chunk(8, 8), graphs)  # type: ignore[arg-type]
    runner.capture(lambda done, total: seen.append((done, total)))
    assert graphs.begun == [4, 2, 1] and graphs.made == 3
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert set(model.counts) == {0, 1}, "no row is valid but the one of a step of one row"
    steps = runner.steps
    steps.join(torch.tensor([5, 7]), [2, 4], [0, 1])
    steps.rehearse(4)  # rows are in use: nothing happens
    steps.step()
    assert steps.last.tolist() == [6, 8] and steps._positions.tolist() == [3, 5, 0, 0]
    steps.keep([1])
    graphs.busiest = 4
    steps.step()
    graphs.busiest = 8  # no graph is as large: the step runs as it is
    steps.step()
    assert steps.last.tolist() == [10] and graphs.made == 3 and graphs.begun == [4, 2, 1, 2, 1, 1]
