"""What the layer costs one device of the 1x8 mesh stays within the goals that benchmarks/tenstorrent_cost.py prints."""

from __future__ import annotations

import importlib.util
import json
import os
import sys

import pytest

from benchmark_scripts import script
from paths import ROOT
from ttnn_moe.models.qwen3 import PRESETS
from ttnn_moe.models.qwen3.tt.sizes import model_sizes
from ttnn_moe.tenstorrent.plans import plan_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ttnn_moe._planner") is None, reason="ttnn_moe._planner is not built: plans come from it"
)


@pytest.fixture
def cost():
    yield script("tenstorrent_cost")
    sys.modules.pop("tenstorrent_cost", None)


def cpu_seconds() -> float:
    """Of this process and of those that it waited for."""
    return sum(os.times()[:4])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "T", "routing"),
    [
        *((chip, T, routing) for chip in ("n150", "p150") for T in (1, 32) for routing in ("uniform", "skewed")),
        ("n150", 4096, "uniform"),
        ("p150", 1024, "skewed"),
        *(
            pytest.param(*again, marks=pytest.mark.long)
            for again in (("p150", 4096, "uniform"), ("n150", 1024, "skewed"))
        ),
    ],
)
def test_goals(cost, chip, T, routing):
    began = cpu_seconds()
    found = cost.emulate(chip, T, routing, "bfloat16")
    assert cpu_seconds() - began < 120
    assert found.weight_over <= 1.05
    assert found.multiplies_over <= 1.05
    assert found.cores_with_weights == found.cores
    assert found.max_over_mean <= 1.2
    if T >= 1024:
        assert found.other_over <= 1.3
        assert found.active_experts == cost.LOCAL
    if T == 4096:
        planned = plan_model("", model_sizes(PRESETS["qwen3-30b-a3b"]), "1x8", chip, "bfloat16", 32, 128).plans
        assert found.weight_bytes == sum(plan.weight_bytes for plan in planned if plan.T == T)
    assert found.l1_high_water <= (1464 if chip == "n150" else 1536) * 1024


def test_weights_of_fewer_bits_are_fewer_bytes(cost):
    wide, narrow = (cost.emulate("p150", 1, "uniform", form) for form in ("bfloat16", "bfloat4_b,bfloat8_b"))
    assert narrow.weight_bytes == wide.weight_bytes * (2 * 576 + 1088) // (3 * 2048)


@pytest.mark.slow
def test_split_experts_are_an_expert_s_bytes_of_each_token(cost):
    found = cost.emulate("n150", 1, "uniform", "bfloat8_b", split=True)
    assert (found.pairs, found.active_experts) == (8, 8)
    assert found.weight_bytes == 3 * 64 * 24 * 1088


def test_the_documented_bytes_of_a_step_are_those_that_the_script_adds_up():
    step = script("tenstorrent_step")
    data = json.loads((ROOT / "benchmarks/results/tenstorrent_cost.json").read_text())
    counted = [row for row in data["costs"] if row["routing"] == "uniform"]
    for way in step.WAYS:
        for B in (1, 32):
            kept = next(row for row in data["steps"]["rows"] if (row["way"], row["B"]) == (way.name, B))
            made = step.step(way, B, counted, "n150")
            for part in ("attention", "experts", "other", "head", "kv", "total"):
                assert getattr(made, part) == kept[part], f"{way.name}, B {B}: {part}; run tenstorrent_step.py again"
    least = {B: min(row["total"] for row in data["steps"]["rows"] if row["B"] == B) for B in (1, 32)}
    assert least[1] < 0.45e9 and least[32] < 2.35e9
