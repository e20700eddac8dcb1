"""The benchmark end to end on the CPU: ttnn-moe bench, benchmarks/moe_layer.py, and what they write."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from command import run
from processes import run_python
from ttnn_moe.backend import Numerics
from ttnn_moe.bench import command, measure, report
from ttnn_moe.bench.attempt import DeviceLost
from ttnn_moe.bench.command import points_of
from ttnn_moe.bench.floor import Ceilings
from ttnn_moe.bench.implementations import Forward, Implementation, ours
from ttnn_moe.bench.layer import GPT_OSS, Layer, Weights
from ttnn_moe.bench.measure import Options, Point, Result, measure_layer
from ttnn_moe.errors import RequestError

LAYER = Layer("small", E=8, K=2, H=64, I=32, dtype=torch.float32)
SIZES = "--experts 8 --topk 2 --hidden 64 --intermediate 32 --rounds 3".split()


class Peer(Implementation):
    """The right result, bent by a test."""

    def __init__(self, name: str, bend: Any = lambda out: out, reason: str | None = None):
        self.name, self.bend, self.reason = name, bend, reason

    def why_not(self, layer: Layer, T: int) -> str | None:
        return self.reason

    def prepare(self, layer: Layer, weights: Weights, T: int) -> Forward:
        right = ours("cpu", "reference")[0].prepare(layer, weights, T)
        weights.once(f"of {self.name}", lambda: "a layout")

        def call(hidden: Tensor, ids: Tensor, scale: Tensor) -> Tensor:
            return self.bend(right(hidden, ids, scale))

        return call


def raises(out: Tensor) -> Tensor:
    raise RuntimeError("no kernel\nfor this")


class Later:
    """Raises from its second pass over `sets` weight sets on."""

    def __init__(self, sets: int) -> None:
        self.left = sets

    def __call__(self, out: Tensor) -> Tensor:
        self.left -= 1
        return out if self.left >= 0 else raises(out)


def measured(implementations: list[Implementation], **options: Any) -> tuple[dict[str, Any], Result]:
    result, given = Result(), Options("cpu", rounds=3, sets=2, **options)
    ceilings = Ceilings(1e10, 1e11)
    measure_layer(LAYER, [Point(4), Point(4, True)], implementations, ceilings, given, result)
    return report.document("cpu", ceilings, given, result, {"other": "not installed"}), result


def test_every_outcome_is_recorded_and_spoils_no_other() -> None:
    implementations = [
        Peer("wrong", lambda out: out * 1.1),
        Peer("right"),
        Peer("raises", raises),
        Peer("later", Later(2)),
        Peer("skips", reason="too many tokens"),
        *ours("cpu", "reference"),
    ]
    data, result = measured(implementations)
    rows = {row["implementation"]: row for row in data["rows"] if not row["skewed"]}
    assert {name: row["status"] for name, row in rows.items()} == {
        "wrong": "wrong",
        "right": "ok",
        "raises": "failed",
        "later": "failed",
        "skips": "skipped",
        "ttnn_moe reference moe": "ok",
        "ttnn_moe reference prepared": "ok",
    }
    assert "off by 1.00e-01" in rows["wrong"]["reason"] and rows["wrong"]["worst_error"] == pytest.approx(0.1, rel=1e-3)
    assert rows["raises"]["reason"] == "RuntimeError: no kernel for this"
    assert rows["later"]["reason"] == "in its first turn: RuntimeError: no kernel for this"
    assert rows["skips"]["reason"] == "too many tokens"
    for name, row in rows.items():
        assert ("median_us" in row) == (row["status"] == "ok"), name
        if row["status"] == "ok":
            assert row["p10_us"] <= row["median_us"] <= row["p90_us"] and row["samples"] == 3
            assert row["over_floor"] == pytest.approx(row["median_us"] / row["floor_us"])
            assert row["worst_error"] < 2e-5 and row["mode"] == "eager"
    assert result.stopped is None and len(data["rows"]) == 2 * len(implementations)
    (layer,) = data["layers"]
    assert [(draw["T"], draw["skewed"]) for draw in layer["draws"]] == [(4, False), (4, True)]
    for draw in layer["draws"]:
        assert len(draw["active_experts"]) == layer["sets"] == 2 and draw["pairs"] == [8, 8]
        assert draw["checked_tokens"] == 4
        assert draw["floor_us"] == pytest.approx(max(draw["byte_floor_us"], draw["flop_floor_us"]), rel=0.5)
    assert data["unavailable"] == {"other": "not installed"}


def test_the_results_survive_json_and_make_a_table(tmp_path: Path) -> None:
    data, _ = measured([Peer("right"), Peer("wrong", lambda out: out * float("nan")), Peer("none", reason="no")])
    path = tmp_path / "results.json"
    report.write(path, data)
    assert json.loads(path.read_text()) == data and list(tmp_path.iterdir()) == [path]
    console = Console(width=200, record=True, file=open(os.devnull, "w"))
    for table in report.tables(data):
        console.print(table)
    text = console.export_text()
    median, ratio = data["rows"][0]["median_us"], data["rows"][0]["over_floor"]
    assert f"{median:.1f} ({ratio:.2f})" in text and "4 skewed" in text
    assert "wrong" in text and "skipped" in text


def test_what_is_skipped_is_told_with_its_reason() -> None:
    data, _ = measured([Peer("right"), Peer("none", reason="no kernel")])
    data["machine"]["cache_bytes"] = None
    assert report.notes(data) == ["small: no none at T=4, 4 skewed: no kernel"]


def test_a_run_that_is_out_of_time_keeps_what_it_has() -> None:
    saved: list[int] = []
    result, options = Result(), Options("cpu", rounds=1, sets=1)

    def save() -> None:
        saved.append(len(result.rows))
        options.deadline = 0.0

    measure_layer(LAYER, [Point(2), Point(3)], ours("cpu", "reference"), Ceilings(1e10, 1e11), options, result, save)
    assert saved == [2] and result.stopped == "out of time before small T=3"


def test_a_run_whose_device_is_lost_saves_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    result, warm_up = Result(), measure.warm_up

    def lost(attempts: Any, clock: Any) -> Any:
        if saved:
            raise DeviceLost("a fault")
        return warm_up(attempts, clock)

    def save() -> None:
        saved.append(len(result.rows))

    monkeypatch.setattr(measure, "warm_up", lost)
    points, options = [Point(2), Point(3), Point(4)], Options("cpu", rounds=1, sets=1)
    measure_layer(LAYER, points, ours("cpu", "reference"), Ceilings(1e10, 1e11), options, result, save)
    assert saved == [2, 2] and result.stopped == "small T=3: the device was lost: a fault"


def test_numbers_that_a_cache_may_have_helped_are_named() -> None:
    data, _ = measured([Peer("right")])
    data["machine"]["cache_bytes"] = 2**20
    assert any("small: at T=4, 4 skewed" in note and "1 MiB" in note for note in report.notes(data))
    data["machine"]["cache_bytes"] = 2**10
    assert report.notes(data) == []


def test_the_command_prints_a_table(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert run(monkeypatch, "bench", "--tokens", "1,5s", *SIZES, "--dtype", "fp32", "--device", "cpu") == 0
    out = capsys.readouterr().out
    assert "E=8 K=2 H=64 I=32 float32, eager" in out and "5 skewed" in out
    for name in ("floor", "ttnn_moe reference moe", "ttnn_moe reference prepared"):
        assert name in out
    assert "GB/s read" in out


@pytest.mark.parametrize("forced", [False, True])
def test_a_pipe_loses_no_cell(monkeypatch, capsys, forced: bool) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if forced:
        monkeypatch.setenv("FORCE_COLOR", "1")
    tokens = [*range(1, 30), 64]
    assert run(monkeypatch, "bench", "--tokens", ",".join(map(str, tokens)), *SIZES, "--rounds", "1") == 0
    out = capsys.readouterr().out
    assert "…" not in out and "\x1b" not in out


def test_a_shut_gate_is_a_failed_check(monkeypatch, capsys) -> None:
    monkeypatch.setattr(command.report, "document", _wrong(command.report.document))
    assert run(monkeypatch, "bench", "--tokens", "1", *SIZES, "--device", "cpu") == 1
    assert "not everything could be measured" in capsys.readouterr().err


@pytest.mark.parametrize("json_", [[], ["--json"]])
def test_a_device_that_is_lost_before_the_first_turn_is_a_failed_check(monkeypatch, capsys, json_: list[str]) -> None:
    """The points before it stand, and those after it are not measured."""
    warm_up, lost = measure.warm_up, DeviceLost("AcceleratorError: unspecified launch failure " + "far " * 40)

    def second(attempts, clock):
        if len(attempts[0].turn.calls[0].args[0]) == 2:
            raise lost
        return warm_up(attempts, clock)

    monkeypatch.setattr(measure, "warm_up", second)
    assert run(monkeypatch, "bench", "--tokens", "1,2,3", *SIZES, "--device", "cpu", *json_) == 1
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and "stopped: layer T=2: the device was lost: AcceleratorError" in said.err
    if json_:
        assert {row["T"] for row in json.loads(said.out)["rows"]} == {1}


def _wrong(document):
    def changed(*args):
        data = document(*args)
        data["rows"][0] |= {"status": "wrong", "reason": "off"}
        return data

    return changed


def test_the_command_asks_the_environment_for_a_backend(monkeypatch, capsys) -> None:
    monkeypatch.setenv("TTNN_MOE_BACKEND", "nope")
    assert run(monkeypatch, "bench", "--tokens", "1", *SIZES) == 2
    assert "TTNN_MOE_BACKEND" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_command_prints_json(monkeypatch, capsys, dtype: str) -> None:
    assert run(monkeypatch, "bench", "--tokens", "7", *SIZES, "--dtype", dtype, "--backend", "reference", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert [row["status"] for row in data["rows"]] == ["ok", "ok"]
    assert torch.__version__.startswith(data["versions"]["torch"]) and data["machine"]["device"] == "cpu"
    assert data["layers"][0]["H"] == 64 and data["rows"][0]["T"] == 7


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--tokens", "0"], "numbers from 1 on"),
        (["--tokens", "1,x"], "'x'"),
        (["--tokens", "1", "--dtype", "int8"], "no such dtype"),
        (["--tokens", "1", "--rounds", "0"], "rounds"),
        (["--tokens", "1", "--topk", "9"], "K <= E"),
        (["--tokens", "1", "--backend", "nosuch"], "nosuch"),
        (["--tokens", "1", "--backend", "tenstorrent"], "tenstorrent"),
        (["--tokens", "1", "--device", "npu"], "npu"),
        (["--tokens", "1", "--experts", "100000", "--hidden", "100000"], "does not fit"),
    ],
)
def test_the_command_refuses_in_one_message(monkeypatch, capsys, args: list[str], told: str) -> None:
    assert run(monkeypatch, "bench", *SIZES, *args) == 2
    said = capsys.readouterr().err
    assert said.startswith("ttnn-moe: ") and told in said and "Traceback" not in said


def test_points() -> None:
    assert points_of("1, 32,4096s") == [Point(1), Point(32), Point(4096, True)]
    assert points_of("2,2,2s") == [Point(2), Point(2, True)], "each is measured once"
    for wrong in ("", "s", "-1", "1,,2", "1 2", "٣"):
        with pytest.raises(RequestError, match="cannot be read"):
            points_of(wrong)


@pytest.mark.slow
def test_the_script_measures_us_and_every_peer_that_is_here(tmp_path: Path) -> None:
    path = tmp_path / "moe_layer.json"
    options = "--layers i1408 --experts 8 --tokens 3 --rounds 1 --sets 2 --device cpu --json"
    done = run_python("benchmarks/moe_layer.py", *options.split(), path)
    data = json.loads(path.read_text())
    rows = {row["implementation"]: row for row in data["rows"]}
    measured_here = ["ttnn_moe reference moe", "torch grouped_mm", "transformers grouped_mm", "transformers batched_mm"]
    assert {name: rows[name]["status"] for name in measured_here} == dict.fromkeys(measured_here, "ok")
    assert "vllm fused_experts" in data["unavailable"] and "vllm fused_experts" in done.stderr
    assert data["layers"][0]["E"] == 8 and data["layers"][0]["name"] == "i1408"


@pytest.mark.parametrize("weight_format", ["dense", "int4_24", "mxfp4"])
def test_a_weight_format_has_its_own_floor(weight_format: str) -> None:
    """Bytes of what is read; random weights of the format pass the gate."""
    layer = Layer("x", 4, 2, 64, 64, weight_format=weight_format)
    held = Weights.random(layer, "cpu", 0).experts.tensors.values()
    assert layer.set_bytes == sum(tensor.nbytes for tensor in held)
    data = command.run(layer, [Point(3)], "reference", Options("cpu", rounds=2, sets=2))
    assert {row["status"] for row in data["rows"]} == {"ok"}
    assert data["layers"][0]["weight_format"] == weight_format
    assert f"{weight_format} weights" in report.tables(data)[0].title or weight_format == "dense"


def test_the_layer_of_gpt_oss_passes_the_gate() -> None:
    layer = replace(GPT_OSS, E=4, H=96, I=160)
    experts = Weights.random(layer, "cpu", 0).experts
    assert (experts.activation, experts.gate_up_order, experts.biased) == ("clamped_swiglu", "interleaved", True)
    assert layer.set_bytes == sum(tensor.nbytes for tensor in experts.tensors.values())
    assert GPT_OSS.set_bytes == 128 * (3 * 2880 * 2880 * 17 // 32 + 2 * 3 * 2880)
    result = Result()
    measure_layer(layer, [Point(3)], ours("cpu", "reference", "mxfp4"), Ceilings(1e10, 1e11), Options("cpu", 2), result)
    assert [row["status"] for row in result.rows] == ["ok", "ok"] and result.layers[0]["activation"] == "clamped_swiglu"


def test_what_rounds_its_operands_is_judged_with_them_rounded() -> None:
    class Rounds(Peer):
        def numerics(self, layer: Layer, T: int) -> Numerics | None:
            return Numerics(operands="mxfp8")

    layer, result = Layer("x", 4, 2, 64, 64, weight_format="mxfp4"), Result()
    peers = [Peer("exact"), Rounds("not rounded")]
    measure_layer(layer, [Point(3)], peers, Ceilings(1e10, 1e11), Options("cpu", 2), result)
    assert [row["status"] for row in result.rows] == ["ok", "wrong"], "MXFP8 costs 3%"


def test_the_command_takes_the_activation_of_gpt_oss(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    asked = ("bench", "--tokens", "2", *SIZES, "--backend", "reference", "--device", "cpu", "--json")
    assert run(monkeypatch, *asked, "--format", "mxfp4", "--activation", "clamped_swiglu") == 0
    (layer,) = json.loads(capsys.readouterr().out)["layers"]
    assert (layer["weight_format"], layer["activation"], layer["biased"]) == ("mxfp4", "clamped_swiglu", True)
    assert run(monkeypatch, *asked, "--activation", "clamped_swiglu") == 2
    assert "clamped_swiglu in dense; expected mxfp4 weights" in capsys.readouterr().err
