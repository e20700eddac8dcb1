"""The benchmark's tables and figure are what the results hold."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmark_scripts import script
from paths import ROOT
from ttnn_moe.errors import RequestError


@pytest.fixture
def tables() -> ModuleType:
    return script("tables")


@pytest.fixture
def layers() -> ModuleType:
    return script("layer_tables")


@pytest.fixture
def plot() -> ModuleType:
    return script("plot")


def results() -> dict[str, Any]:
    """One layer, two points; an implementation with a time, one that is wrong, one that has a time at one point."""
    floors = {"floor_us": 10.0, "byte_floor_us": 10.0, "flop_floor_us": 1.0}
    points = [{"T": 4, "skewed": False}, {"T": 4, "skewed": True}]

    def row(name: str, mode: str, point: dict[str, Any], us: float | None) -> dict[str, Any]:
        told = {"status": "wrong"} if us is None else {"status": "ok", "median_us": us, "over_floor": us / 10}
        return {"layer": "x", "implementation": name, "mode": mode} | point | floors | told

    sizes = {"name": "x", "E": 8, "E_of_the_model": 16, "K": 2, "H": 3, "I": 4}
    rows = [row("ttnn_moe cuda prepared", mode, p, 20.0) for mode in ("graph", "eager") for p in points]
    rows += [row("torch grouped_mm", "graph", points[0], None), row("torch grouped_mm", "graph", points[1], 1234.5)]
    return {
        "machine": {"name": "G", "read_bytes_per_s": 4e12, "flops_per_s": 8e14},
        "versions": {"torch": "1", "cuda": "2"},
        "options": {"rounds": 7},
        "rows": rows,
        "layers": [sizes | {"draws": [point | floors for point in points]}],
    }


def test_a_table_holds_what_has_a_time(layers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "results", lambda name: results())
    assert layers.moe_layer().splitlines()[:6] == [
        "| T | 4 | 4 skewed |",
        "|---|---|---|",
        "| floor | 10.0 | 10.0 |",
        "| ttnn_moe, graph | 20.0 (2.00) | 20.0 (2.00) |",
        "| torch grouped_mm, graph |  | 1234 (123.45) |",
        "| ttnn_moe, eager | 20.0 (2.00) | 20.0 (2.00) |",
    ]
    whole = layers.moe_layer_all()
    assert "### x: E 8 of the model's 16, K 2" in whole and "4.00 TB/s and 800 TFLOP/s" in whole


def test_a_page_is_filled_between_its_marks(tables: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "TABLES", {"a": lambda: "new\n", "b": lambda: "other\n"})
    page = "1\n<!-- a -->\nold\nold\n<!-- end -->\n2\n<!-- b -->\n<!-- end -->\n3\n"
    want = "1\n<!-- a -->\nnew\n<!-- end -->\n2\n<!-- b -->\nother\n<!-- end -->\n3\n"
    assert tables.updated(page) == want == tables.updated(want)
    with pytest.raises(ValueError, match="'c'"):
        tables.updated("<!-- c -->\n<!-- end -->\n")


def test_peers_measured_apart_stand_over_their_own_floor(layers: ModuleType) -> None:
    machine = {"read_bytes_per_s": 4.3e12, "flops_per_s": 790e12}
    rows = json.loads((ROOT / "benchmarks/results/peers_h200.json").read_text())["rows"]
    vllm = {
        (r["T"], r["skewed"]): layers.over_floor(r, machine) for r in rows if r["implementation"].startswith("vLLM")
    }
    assert vllm[1, False] == pytest.approx(31.0 / 17.6, rel=0.01)
    assert vllm[8, False] == pytest.approx(1.17, rel=0.01) and vllm[32, False] == pytest.approx(1.07, rel=0.01)
    assert vllm[16384, False] == pytest.approx(3037 / 1566, rel=0.01)
    assert vllm[4096, True] == pytest.approx(939 / 391, rel=0.01)


def test_the_pages_show_the_results(tables: ModuleType) -> None:
    for page in tables.PAGES:
        text = page.read_text()
        assert any(f"<!-- {name}" in text for name in tables.TABLES), page.name
        assert tables.updated(text) == text, "run python benchmarks/tables.py"


def test_the_figure_is_drawn_from_the_results(plot: ModuleType) -> None:
    assert plot.drawn_from() in (ROOT / "docs/moe_layer.svg").read_text(), "run python benchmarks/plot.py"


def test_the_figure_is_the_same_again(plot: ModuleType, layers: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    apart = layers.results("peers_h200.json")
    for name in ("a.svg", "b.svg"):
        plot.draw(layers.results("moe_layer.json"), apart, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert "ttnn_moe" in (tmp_path / "a.svg").read_text()


def test_the_mxfp4_benchmark_takes_families_and_the_peers_that_are_here() -> None:
    layers = script("mxfp4_layer")
    found, unavailable = layers.implementations("")
    names = [one.name for one in found]
    assert names[0] == "ttnn_moe cuda prepared" and "mxfp4_few" in names
    peers = {peer.name for peer in layers.MXFP4_PEERS}
    assert peers == (peers & set(names)) | set(unavailable)
    assert [one.name for one in layers.implementations("mxfp4_few")[0]] == ["mxfp4_few", "mxfp4_few_boxes"]
    with pytest.raises(RequestError, match="nothing to measure; got nonesuch"):
        layers.implementations("nonesuch")
    assert {name: layer.weight_format for name, layer in layers.LAYERS.items()} == {
        "gpt-oss-120b": "mxfp4",
        "qwen3-30b-a3b": "mxfp4",
    }
    assert layers.BF16.weight_format == "dense" and layers.BF16.name not in layers.LAYERS
