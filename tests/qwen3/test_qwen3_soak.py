"""The soak for some seconds; make soak runs it for ten minutes."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

import engine_soak
from ttnn_moe.models.qwen3.runtime.requests import Request


def test_a_short_soak() -> None:
    book = engine_soak.soak(60, seed=4, rounds=3)
    assert not book.problems
    assert book.counts["rounds"] == 3
    assert min(book.counts[f"rounds of {kind}"] for kind in ("steps", "streams", "threads")) > 0
    assert book.counts["requests finished"] > 20 and book.counts["refused: bad arguments"] > 0


def test_it_finds_requests_that_share_randomness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Request, "draw", lambda request: torch.rand((), dtype=torch.float64))
    book = engine_soak.soak(60, seed=4, rounds=3)
    assert book.problems and all(problem.startswith("seed 4, round ") for problem in book.problems)


def test_it_finds_rows_that_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_soak.Engine, "cancel", lambda engine, number: False)
    assert engine_soak.soak(60, seed=4, rounds=3).problems


@pytest.mark.parametrize("problems", [[], ["seed 5, round 0: wrong"]])
def test_the_exit_code_says_what_it_found(problems: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    book = engine_soak.Book()
    book.problems += problems
    monkeypatch.setattr(engine_soak, "soak", lambda *_: book)
    app = engine_soak.typer.Typer()
    app.command()(engine_soak.main)
    result = CliRunner().invoke(app, ["--seconds", "0", "--seed", "5", "--device", "cpu"])
    assert result.exit_code == len(problems) and "seed 5, on cpu" in result.output
