"""What selfcheck runs of each tile: here with software atoms, on a GPU of another compute capability."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from cuda_gpus import gpu_of, not_hopper, pretend
from paths import python_path
from ttnn_moe import Experts, Problem
from ttnn_moe.cuda.arch import HOPPER
from ttnn_moe.cuda.jit import build
from ttnn_moe.cuda.moe import tile_checks
from ttnn_moe.cuda.moe.mxfp4_tiles import TILES, Tile
from ttnn_moe.cuda.moe.sm120_mxfp4 import Sm120Mxfp4
from ttnn_moe.selfcheck.apart import call_apart
from ttnn_moe.selfcheck.check import Outcome


class TwoTiles(Sm120Mxfp4):
    def checked_tiles(self) -> tuple[Tile, ...]:
        return TILES[0], TILES[-1]


class FourTiles(Sm120Mxfp4):
    """The first two fail: see faulty."""

    def checked_tiles(self) -> tuple[Tile, ...]:
        return TILES[:4]


def of_eight_tokens(family: Any, tile: Tile, device: int) -> tuple[Outcome, dict[int, float]]:
    return tile_checks.measured(family, tile, device, (8,))


def faulty(family: Any, tile: Tile, device: int) -> tuple[Outcome, dict[int, float]]:
    """In place of `measured`: a kernel that kills its process, one that raises, two that run."""
    if tile == TILES[0]:
        os.kill(os.getpid(), signal.SIGSEGV)
    if tile == TILES[1]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return Outcome(str(tile), True, 0.001, 1.0), {8: 10.0 - TILES.index(tile), 4096: 100.0}


def test_a_tile_that_faults_ends_its_own_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, gpu_of((12, 0)))
    monkeypatch.setattr(build, "why_not", lambda: None)
    died, raised, *passed, few, many = map(str, tile_checks.checks("mxfp4", (FourTiles(),), faulty))
    assert died.startswith(f"FAIL sm120_mxfp4, {TILES[0]}, T=") and "its process died by SIGSEGV" in died
    assert raised.startswith("FAIL") and "RuntimeError: CUDA error: an illegal memory access" in raised
    assert len(passed) == 2 and all(line.startswith("ok") for line in passed)
    assert few == f"T=8, E=8, K=2, H=2048, I=1024: fastest {TILES[3]} (7 us), sm120_mxfp4 chooses 8x64 (which failed)"
    assert many.startswith("T=4096") and f"fastest {TILES[2]}" in many


def test_a_tile_that_hangs_fails() -> None:
    start = time.perf_counter()
    with pytest.raises(RuntimeError, match=r"no result within 0.1 s"):
        call_apart(0.1, time.sleep, 600)
    assert time.perf_counter() - start < 60


@pytest.mark.gpu
@not_hopper
def test_each_tile_passes_and_the_fastest_is_named() -> None:
    family = TwoTiles(software=True)
    *outcomes, line = tile_checks.checks("mxfp4", (family,), of_eight_tokens)
    assert len(outcomes) == 2 and all(outcome.passed for outcome in outcomes), outcomes  # type: ignore[union-attr]
    own = family.tile(Problem(8, 8, 2, 64, 64, weight_format="mxfp4"), HOPPER)
    assert isinstance(line, str) and line.startswith("T=8, E=8, K=2") and f"{family.name} chooses {own}" in line


@pytest.mark.gpu
@not_hopper
def test_no_other_family_has_tiles_to_check() -> None:
    assert list(tile_checks.checks("mxfp4")) == [] == list(tile_checks.checks("dense"))


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
