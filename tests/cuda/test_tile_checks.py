"""What selfcheck runs of each tile: here with software atoms, on a GPU of another compute capability."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from paths import python_path
from ttnn_moe import Experts, Problem
from ttnn_moe.cuda.arch import HOPPER
from ttnn_moe.cuda.moe import tile_checks
from ttnn_moe.cuda.moe.mxfp4_tiles import TILES, Tile
from ttnn_moe.cuda.moe.sm120_mxfp4 import Sm120Mxfp4
from ttnn_moe.selfcheck.check import measure

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
not_hopper = pytest.mark.skipif(CAPABILITY != (9, 0), reason="no GPU of compute capability 9.0 is here")


class TwoTiles(Sm120Mxfp4):
    def checked_tiles(self) -> tuple[Tile, ...]:
        return TILES[0], TILES[-1]


@pytest.mark.gpu
@not_hopper
def test_each_tile_passes_and_the_fastest_is_named() -> None:
    family = TwoTiles(software=True)
    outcomes = [measure(check, "cuda") for check in tile_checks.checks("mxfp4", (family,))]
    assert len(outcomes) == 2 and all(outcome.passed for outcome in outcomes), outcomes
    own = family.tile(Problem(8, 8, 2, 64, 64, weight_format="mxfp4"), HOPPER)
    (line,) = tile_checks.advice("mxfp4", (family,), (8,))
    assert line.startswith("T=8, E=8, K=2") and f"{family.name} chooses {own}" in line


@pytest.mark.gpu
@not_hopper
def test_no_other_family_has_tiles_to_check() -> None:
    assert list(tile_checks.checks("mxfp4")) == [] and list(tile_checks.advice("dense")) == []


def test_drawn_calls_ignore_the_defaults_of_torch() -> None:
    experts = Experts.dense(torch.zeros(8, 128, 64), torch.zeros(8, 64, 64))
    want, routing = tile_checks._call(9, experts)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        got, again = tile_checks._call(9, experts)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert torch.equal(got, want) and torch.equal(again.topk_ids, routing.topk_ids)
    assert torch.equal(again.topk_weights, routing.topk_weights)


def test_the_backend_imports_no_benchmark() -> None:
    """The checks of tiles draw the benchmark's layers; a program that only calls the operator needs none."""
    code = "import sys, ttnn_moe.cuda.backend; print([name for name in sys.modules if '_moe.bench' in name])"
    env = os.environ | {"PYTHONPATH": python_path()}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
    assert done.stdout == "[]\n", done
