"""Calls that one family of kernels runs, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from ttnn_moe.contract import Problem
from ttnn_moe.cuda.arch import Target
from ttnn_moe.cuda.moe import run
from ttnn_moe.cuda.moe.families import Chosen
from ttnn_moe.cuda.moe.family import Family


def only(wanted: Family[Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, each call takes this family; a test of what it does not run is skipped with the reason."""

    def choose(problem: Problem, target: Target, *, aligned: bool) -> Chosen:
        assert aligned
        if (reason := wanted.why_not(problem, target)) is not None:
            pytest.skip(reason)
        plan = wanted.plan(problem, target)
        return Chosen(wanted, plan, wanted.scratch(plan), {})

    monkeypatch.setattr(run, "choose", choose)
    run.chosen_of.cache_clear()
    request.addfinalizer(run.chosen_of.cache_clear)
