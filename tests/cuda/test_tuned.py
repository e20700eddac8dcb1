"""Tiles that `ttnn-moe bench --tune` keeps, and plans that take them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from cuda_gpus import gpu_of
from ttnn_moe.bench import tune
from ttnn_moe.bench.command import points_of
from ttnn_moe.bench.layer import Layer
from ttnn_moe.bench.measure import Options, Point
from ttnn_moe.contract import Problem
from ttnn_moe.cuda.arch import ARCHES, Target
from ttnn_moe.cuda.moe import tuned
from ttnn_moe.cuda.moe.sm80 import SM80, WarpTile
from ttnn_moe.errors import RequestError

TARGET = Target(gpu_of((8, 0)), ARCHES[8, 0])
PROBLEM = Problem(512, 128, 8, 2048, 768)
OTHER = WarpTile(2, 2, 64, 4, read_once=True)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TTNN_MOE_CACHE_DIR", str(tmp_path))
    tuned._entries.cache_clear()
    return tmp_path / "tiles"


def tile(T: int, problem: Problem = PROBLEM, target: Target = TARGET) -> WarpTile:
    return SM80.plan(replace(problem, T=T), target).tile


def test_plans_take_what_was_kept_for_about_as_many_tokens(folder: Path) -> None:
    own = {T: tile(T) for T in (64, 255, 256, 512, 1024, 1025, 4096)}
    assert OTHER not in own.values()
    path = tuned.keep(TARGET, [(PROBLEM, OTHER)])
    assert path is not None and Path(path).parent == folder
    assert {T: tile(T) for T in own} == {**own, 256: OTHER, 512: OTHER, 1024: OTHER}, "up to twice as many, or half"


def test_a_call_without_tokens_has_the_plan_that_it_had() -> None:
    own = tile(0)
    tuned.keep(TARGET, [(replace(PROBLEM, T=1), OTHER)])
    assert tile(1) == OTHER != own == tile(0)


def test_the_nearest_number_of_tokens_counts_and_a_later_run_replaces(folder: Path) -> None:
    fast, slow = WarpTile(4, 2, 160, 3), OTHER
    tuned.keep(TARGET, [(PROBLEM, slow), (replace(PROBLEM, T=1024), fast)])
    assert [tile(T) for T in (512, 700, 800, 1024)] == [slow, slow, fast, fast]
    tuned.keep(TARGET, [(PROBLEM, fast)])
    assert tile(512) == fast == tile(1024)
    (file,) = folder.glob("*.json")
    assert [entry["T"] for entry in json.loads(file.read_text())["entries"]] == [1024, 512]
    assert tuned.tuned_tiles(PROBLEM, TARGET, [OTHER, fast, WarpTile(2, 2, 160, 3)]) == [fast]


def test_other_sizes_gpus_and_architectures_keep_their_own() -> None:
    tuned.keep(TARGET, [(PROBLEM, OTHER)])
    assert tile(512) == OTHER
    others = [replace(PROBLEM, H=4096), replace(PROBLEM, E=64), replace(PROBLEM, dtype=torch.float16, out_dtype=None)]
    assert OTHER not in [tile(512, problem) for problem in others]
    elsewhere = [replace(TARGET, gpu=replace(TARGET.gpu, name="another")), replace(TARGET, arch=ARCHES[8, 7])]
    assert OTHER not in [tile(512, PROBLEM, target) for target in elsewhere]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        '{"kernels": "of another version", "entries": []}',
        '{"kernels": DIGEST, "entries": [{"T": 0, "sizes": {}, "tile": {}}]}',
        '{"kernels": DIGEST, "entries": [{"T": 0, "sizes": SIZES, "tile": {"warps_m": 99}}]}',
        '{"kernels": DIGEST, "entries": [{"T": 512, "sizes": SIZES, "tile": {"warps_m": 99}}]}',
        '{"kernels": DIGEST, "entries": [3]}',
    ],
)
def test_a_file_that_is_not_ours_is_not_used(folder: Path, text: str) -> None:
    own = tile(512)
    path = tuned.keep(TARGET, [(PROBLEM, OTHER)])
    assert path is not None and tile(512) == OTHER
    digest, sizes = json.dumps(tuned.sources_digest()), json.dumps(tuned.sizes_of(PROBLEM))
    Path(path).write_text(text.replace("DIGEST", digest).replace("SIZES", sizes))
    tuned._entries.cache_clear()
    assert tile(512) == own


def test_tiles_of_other_kernels_are_not_used(folder: Path) -> None:
    own = tile(512)
    path = Path(tuned.keep(TARGET, [(PROBLEM, OTHER)]) or "")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"kernels": "of another version"}))
    tuned._entries.cache_clear()
    assert tile(512) == own


def test_what_another_process_kept_meanwhile_stays(folder: Path) -> None:
    path = Path(tuned.keep(TARGET, [(PROBLEM, OTHER)]) or "")
    assert tile(512) == OTHER  # read, and kept in memory
    data = json.loads(path.read_text())
    data["entries"].append({**data["entries"][0], "T": 4096})
    path.write_text(json.dumps(data))
    tuned.keep(TARGET, [(replace(PROBLEM, T=1), OTHER)])
    assert sorted(entry["T"] for entry in json.loads(path.read_text())["entries"]) == [1, 512, 4096]


def test_a_tile_that_the_architecture_cannot_hold_is_not_taken() -> None:
    narrow = Target(gpu_of((8, 6)), ARCHES[8, 6])
    own = tile(512, PROBLEM, narrow)
    tuned.keep(narrow, [(PROBLEM, WarpTile(4, 2, 160, 3))])
    assert tile(512, PROBLEM, narrow) == own


def test_tune_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from ttnn_moe.cli import app

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(app, ["bench", "--tune", "--tokens", "512", "--experts", "8", "--hidden", "128"])
    assert done.exit_code != 0 and "cuda" in str(done.exception)


LAYER = Layer("layer", 128, 8, 2048, 768)


def tuned_points(
    monkeypatch: pytest.MonkeyPatch,
    *points: Point,
    faults: Callable[[WarpTile], bool] = lambda tile: False,
    lost: int = 1 << 30,
) -> list[Point]:
    """Tune where SM80's OTHER tile is the fastest, without a GPU; the points that were measured.

    faults: tiles whose first calls end their process. lost: tokens with which the device is lost.
    """
    measured: list[Point] = []

    def measure(layer: Layer, points: Any, made: Any, ceilings: Any, options: Any, result: Any) -> None:
        assert points, "measure_layer takes one at least"
        measured.extend(points)
        if lost <= points[-1].T:
            result.stopped = f"layer T={lost}: the device was lost: a fault"
        for one, point in product(made, [point for point in points if point.T < lost]):
            row = {"implementation": one.name, "T": point.T, "skewed": point.skewed, "mode": "graph", "status": "ok"}
            result.rows.append({**row, "median_us": 1.0 if one.tile == OTHER else 9.0})

    def apart(seconds: float, function: Any, layer: Layer, one: Any, device: int) -> None:
        if faults(one.tile):
            raise RuntimeError("its process died by SIGSEGV without a result")

    monkeypatch.setattr(tune, "call_apart", apart)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tune, "target_of", lambda: TARGET)
    monkeypatch.setattr(tune, "compile_all", lambda *_: None)
    monkeypatch.setattr(tune, "measure_ceilings", lambda *_: None)
    monkeypatch.setattr(tune, "measure_layer", measure)
    tune.tune(LAYER, points, Options("cuda"), Console())
    return measured


def test_tune_measures_the_routing_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    points = points_of("2048s,512")
    assert tuned_points(monkeypatch, *points) == [Point(512), Point(2048, skewed=True)]
    assert "2048 skewed" in capsys.readouterr().out
    assert tile(512) == OTHER == tile(2048)


def test_one_number_of_tokens_keeps_one_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="one tile only; got uniform and skewed routing for 512 tokens"):
        tuned_points(monkeypatch, *points_of("512,64,512s"))
    assert tuned_points(monkeypatch, *points_of("512s,512s")) == [Point(512, skewed=True)]


def test_a_tile_that_faults_is_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tile(512)
    tuned_points(monkeypatch, Point(512), faults=lambda tile: tile == OTHER)
    said = " ".join(capsys.readouterr().out.split())
    assert f"left out: sm80, {tune.name_of(OTHER)}: its process died by SIGSEGV" in said
    assert tile(512) == own


def test_where_the_own_choice_faults_the_fastest_other_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tile(512)
    tuned_points(monkeypatch, Point(512), faults=lambda tile: tile == own)
    assert "failed" in capsys.readouterr().out
    assert tile(512) == OTHER


def test_a_device_that_is_lost_on_the_way_is_a_failed_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tile(8192)
    with pytest.raises(typer.Exit) as end:
        tuned_points(monkeypatch, *points_of("512,8192"), lost=8192)
    assert end.value.exit_code == 1 and "stopped: layer T=8192: the device was lost" in capsys.readouterr().err
    assert tile(512) == OTHER and tile(8192) == own


def test_where_every_tile_faults_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    own = tile(512)
    with pytest.raises(RequestError, match="nothing could be timed; got no tile that runs"):
        tuned_points(monkeypatch, Point(512), faults=lambda tile: True)
    assert tile(512) == own


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
def test_tune_keeps_what_it_measured(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from ttnn_moe.cli import app

    sizes = ["--experts", "16", "--topk", "4", "--hidden", "256", "--intermediate", "128", "--rounds", "10"]
    done = CliRunner().invoke(app, ["bench", "--tune", "--tokens", "1,100", *sizes], catch_exceptions=False)
    assert done.exit_code == 0
    said = capfd.readouterr().out + done.output
    assert "T=1: few has one form" in said and "plans of new processes" in " ".join(said.split())
    (file,) = folder.glob("*.json")
    assert [entry["T"] for entry in json.loads(file.read_text())["entries"]] == [100]
