"""Captures in several graphs, with a stand-in for CUDA that writes down what is asked of it."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models.qwen3 import TINY, graphs, load_model


class Cuda:
    """Steps that ran, and those of each graph."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.ran: list[str] = []
        self.into: list[str] | None = None
        stream = SimpleNamespace(wait_stream=lambda other: None)
        for name, value in {
            "Stream": lambda: stream, "current_stream": lambda: stream, "stream": lambda s: nullcontext(),
            "CUDAGraph": lambda: SimpleNamespace(kernels=[]), "graph": self.graph,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)

    @contextmanager
    def graph(self, graph: Any, pool: object) -> Any:
        assert self.into is None, "a capture within another"
        self.into = graph.kernels
        graph.replay = lambda: self.ran.append(" ".join(graph.kernels))
        try:
            yield
        finally:
            self.into = None

    def launch(self, kernel: str) -> None:
        (self.ran if self.into is None else self.into).append(kernel)


def _model(cuda: Cuda, layers: int) -> torch.Tensor:
    cuda.launch("embed")
    for i in range(layers):
        cuda.launch(str(i))
        graphs.layer_ended()
    cuda.launch("head")
    return torch.zeros(1)


@pytest.mark.parametrize(
    ("cuts", "pieces"),
    [
        ((), ["embed 0 1 2 head"]),
        ((1,), ["embed 0", "1 2 head"]),
        ((1, 2), ["embed 0", "1", "2 head"]),
        ((3, 9), ["embed 0 1 2", "head"]),
    ],
)
def test_pieces_follow_one_another(monkeypatch: pytest.MonkeyPatch, cuts: tuple[int, ...], pieces: list[str]) -> None:
    cuda = Cuda(monkeypatch)
    captured = graphs.capture(lambda: _model(cuda, 3), object(), cuts)
    assert cuda.ran == ["embed", "0", "1", "2", "head"] and cuda.into is None  # once, before it is captured
    for _ in range(2):
        cuda.ran.clear()
        captured.replay()
        assert cuda.ran == pieces
    graphs.layer_ended()  # means nothing now


@pytest.mark.parametrize("wanted", [[], [2], [0, 1, 2]])
def test_a_model_tells_of_every_layer_whatever_is_wanted(monkeypatch: pytest.MonkeyPatch, wanted: list[int]) -> None:
    cuda = Cuda(monkeypatch)
    model = load_model(TINY, backend="reference", device="cpu", dtype=torch.float32)
    cache, L = model.new_cache(1, 3), model.config.num_hidden_layers
    step = cache.prefill([(0, 3)], wanted)
    captured = graphs.capture(lambda: model(torch.tensor([1, 2, 3]), cache, step), object(), (L, L + 1))
    captured.replay()
    assert len(cuda.ran) == 2 and captured.out.shape == (len(wanted), model.config.vocab_size)


def test_what_fails_leaves_no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    runs = []

    def run() -> torch.Tensor:
        runs.append(1)
        out = _model(cuda, 2)
        if len(runs) == 2:
            raise RuntimeError("no")
        return out

    with pytest.raises(RuntimeError, match="no"):
        graphs.capture(run, object(), (1,))
    assert cuda.into is None
    graphs.layer_ended()


def test_without_cuda_it_runs_again() -> None:
    captured = graphs.capture(lambda: torch.ones(2), None, (1,))
    with torch.inference_mode():
        captured.out.zero_()
        captured.replay()
    assert captured.out.tolist() == [1, 1]
