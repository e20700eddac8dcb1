"""Qwen3 on Tenstorrent from the command line: the demo, the benchmark, profiles, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from qwen3_checkpoints import TINY, make
from ttnn_moe import BackendUnavailable, ContractError, RequestError, tenstorrent
from ttnn_moe.errors import CheckpointError
from ttnn_moe.kv import formats
from ttnn_moe.models.qwen3 import PRESETS, Engine, Qwen3MoeConfig, bench, demo, generate, tt
from ttnn_moe.models.qwen3.model import sizes_of
from ttnn_moe.models.qwen3.tt.cache import EightBitCache, PagedCache
from ttnn_moe.models.qwen3.tt.model import load_onto
from ttnn_moe.models.qwen3.tt.profile import Profile, prepare
from ttnn_moe.models.qwen3.tt.request import Options, check, chips_of, splits
from ttnn_moe.models.qwen3.tt.room import room_for
from ttnn_moe.models.qwen3.tt.sizes import check_mesh, model_sizes
from ttnn_moe.models.qwen3.tt.weights import Mover
from ttnn_moe.tenstorrent.memory import PAGE
from ttnn_moe.tenstorrent.plans import longest_sequence, plan_model
from ttnn_moe.tenstorrent.runtime import DEVICE, EMULATOR


def test_the_demo(capsys: pytest.CaptureFixture[str], emulated: None) -> None:
    args = ["--backend", "tenstorrent", "--device", EMULATOR, "--mesh", "1x2", "--prompt", "Copy: 62DEADB9"]
    assert demo.main(args) == 0
    said = capsys.readouterr()
    assert "62DEADB9" in said.out and "tenstorrent on emulated blackhole 1x2" in said.err


def test_the_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str], emulated: None) -> None:
    sizes = ["--config", str(TINY), "--batch", "2", "--prompt-len", "20", "--new-tokens", "3"]
    args = [*sizes, "--backend", "tenstorrent", "--device", EMULATOR, "--mesh", "1x2"]
    assert bench.main([*args, "--json", str(tmp_path / "out.json")]) == 0
    said = " ".join(capsys.readouterr().out.split())  # the title may be broken into lines
    assert "tenstorrent on emulated blackhole 1x2, bfloat16" in said
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["backend"] == "tenstorrent" and figures["tokens_per_s"] > 0
    for more, words in (
        (["--random-weights"], "not made on a Tenstorrent device"),
        (["--mesh", "8"], "1xD, as in 1x8"),
        (["--batch", "33"], "at most 32"),
        (["--dtype", "float32"], "in bfloat16"),
    ):
        assert bench.main([*args, *more]) == 2
        assert words in capsys.readouterr().err
    assert bench.main([*sizes, "--mesh", "1x2", "--backend", "reference"]) == 2
    assert "is of backend tenstorrent" in capsys.readouterr().err


REFUSED = {
    "mesh of another form": (["--mesh", "2x4"], "got '2x4'; expected 1xD"),
    "no mesh": (["--mesh", "1x0"], "got '1x0'"),
    "experts that cannot be shared": (["--mesh", "1x3"], "cannot be shared evenly"),
    "another device": (["--device", "cuda"], "no device cuda of backend tenstorrent"),
    "another board": (["--device", "emulator:n900"], "no such chip to emulate"),
    "another dtype": (["--dtype", "float16"], "--dtype float16"),
    "a KV cache of a GPU": (["--kv", "bucketed"], "got kv=bucketed; expected one of ['paged', 'bfloat8_b']"),
    "a trace on the emulator": (["--trace"], "cannot be traced"),
    "a profile on the emulator": (["--profile"], "cannot be timed"),
    "a trace and a profile": (["--trace", "--profile"], "not both"),
    "layers that are not there": (["--weights", "down@99=bfloat8_b"], "names no layers of the model"),
    "too many prompts": (["--prompt", "x"] * 33, "got 33; expected at most 32"),
    "prompt over the context": (["--prompt", "x1y2" * 2000], "too long for the context"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_the_demo_refuses(name: str, capsys: pytest.CaptureFixture[str], emulated: None) -> None:
    args, words = REFUSED[name]
    assert demo.main(["--backend", "tenstorrent", *args]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.out == ""


def test_formats_of_layers_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whatever reads a model's formats, before it opens a device."""
    config = PRESETS["qwen3-30b-a3b"]
    monkeypatch.setenv("TTNN_MOE_TT_WEIGHTS", text := "down@0-99=bfloat8_b")
    for refused in (
        lambda: plan_model("", model_sizes(config), "1x8", "n300", text, 32, 128),
        lambda: longest_sequence(model_sizes(config), 8, "blackhole", text, 32),
        lambda: tt.load_model(TINY),
        lambda: load_onto(SimpleNamespace(D=1, emulated=True), TINY),
    ):
        with pytest.raises(ContractError, match="names no layers of the model"):
            refused()


def test_what_is_of_no_other_backend(capsys: pytest.CaptureFixture[str]) -> None:
    given = [["--mesh", "1x1"], ["--trace"], ["--profile"], ["--weights", "bfloat8_b"], ["--experts", "split"]]
    given += [["--no-trace"], ["--mesh", ""], ["--weights", ""], ["--experts", ""], ["--kv", "bfloat8_b"]]
    for args in given:
        assert demo.main(["--backend", "reference", *args]) == 2
        assert f"{args[0]} is of backend tenstorrent" in capsys.readouterr().err
    assert demo.main(["--backend", "tenstorrent", "--parallel", "tensor", "--mesh", "1x2"]) == 2
    assert "in one process; got --parallel tensor; to fix it: leave it out" in capsys.readouterr().err


def test_meshes() -> None:
    assert [chips_of(mesh) for mesh in (None, "1x1", "1x8", "1x32")] == [1, 1, 8, 32]
    for mesh in ("", "8", "1x", "1x08", "x8", "1x8 ", "1x8x1", "8x1", "-1x8"):
        with pytest.raises(RequestError, match="wrong form"):
            chips_of(mesh)


def test_whether_experts_are_split() -> None:
    config = PRESETS["qwen3-30b-a3b"]
    found = {
        (words, rows): splits(config, rows, Options("1x8", experts=words))
        for words in (None, "placed", "split", "auto")
        for rows in (1, 32)
    }
    assert {key for key, split in found.items() if split} == {("split", 1), ("split", 32), ("auto", 1)}
    for words, mesh in (("both", "1x8"), ("split", "1x16")):
        with pytest.raises(RequestError, match="--experts cannot be had"):
            splits(config, 1, Options(mesh, experts=words))


def test_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEVICE, raising=False)
    monkeypatch.setattr(
        tenstorrent.device, "probe", lambda device: tenstorrent.device.Probe(False, "no card", "buy one")
    )
    with pytest.raises(BackendUnavailable, match="no card; to fix it: buy one"):
        check(Qwen3MoeConfig.from_directory(TINY), 1, Options())


def test_sizes_that_are_no_tiles_are_refused(tmp_path: Path, emulated: None) -> None:
    with pytest.raises(CheckpointError, match="moe_intermediate_size=48, head_dim=96"):
        tt.load_model(make(tmp_path, head_dim=96))


def test_engines_too_large_and_too_small(emulated: None) -> None:
    model = tt.load_model(TINY)
    with pytest.raises(RequestError, match="got 33; expected at most 32"):
        Engine(model, 33, 8)
    with pytest.raises(RequestError, match="too long for a row"):
        generate(model, [[1] * 20], max_new_tokens=20, engine=Engine(model, 1, 32))
    with pytest.raises(RequestError, match="no step of this model can be captured"):
        Engine(model, 1, 8, graphs=True)
    with pytest.raises(RequestError, match="got 64; expected 32"):
        Engine(model, 1, 8, page=64)
    with pytest.raises(RequestError, match="the memory holds no page"):
        Engine(model, 1, 8, memory=100)
    for rows, capacity, words in (
        ("x", 8, "rows is no integer"),
        (10**9, 8, "rows is out of range"),
        (1, 2.5, "capacity is no integer"),
        (1, 10**12, "capacity is out of range"),
    ):
        with pytest.raises(RequestError, match=words):
            model.new_cache(rows, capacity)  # type: ignore[arg-type]
    cache = model.new_cache(1, 4)
    cache.open(0, 4)
    with pytest.raises(RequestError, match="got 0 tokens and 33 more; expected at most 32"):
        cache.prefill([(0, 33)], [32])
    with pytest.raises(BackendUnavailable, match="another mesh is open"):
        tt.load_model(TINY, 2)


@pytest.mark.parametrize(
    ("part", "words"), [("head", "no room for embedding, head"), ("layer", "room for 0 of 5 layers")]
)
def test_a_model_that_does_not_fit(part: str, words: str, monkeypatch: pytest.MonkeyPatch, emulated: None) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("TT_FATAL: Out of Memory: Not enough space to allocate")

    monkeypatch.setattr(Mover, part, full)
    with pytest.raises(RequestError, match=f"the model does not fit the chips' memory; got {words}.*more chips"):
        tt.load_model(TINY)


def test_memory_of_a_cache() -> None:
    config = Qwen3MoeConfig.from_directory(TINY)
    per_token = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    sizes = sizes_of(config, torch.bfloat16)
    assert PagedCache.page_bytes(sizes) == PAGE * per_token == formats.bytes_for("paged", None, sizes, 1, 64) / 2
    eight = PAGE * per_token * 17 // 32
    assert EightBitCache.page_bytes(sizes) == eight == formats.bytes_for("bfloat8_b", None, sizes, 1, 64) / 2
    with pytest.raises(RequestError, match="kv='bfloat8_b' on cpu; .*; to fix it: leave kv out"):
        formats.new_cache("bfloat8_b", None, sizes, 1, 32)
    with pytest.raises(RequestError, match="the KV cache does not fit the chips' memory; got 9 MiB"):
        with room_for("the KV cache", "9 MiB", "less"):
            raise RuntimeError("Out of Memory: Not enough space to allocate")
    with pytest.raises(RuntimeError, match="something else"), room_for("it", "1", "less"):
        raise RuntimeError("something else")


def test_a_profile_adds_up() -> None:
    profile = Profile()
    for name, seconds in (("a", 0.001), ("b", 0.5), ("a", 0.002)):
        profile.add(name, seconds)
    assert profile.rows() == {"b (1)": "500.0 ms", "a (2)": "3.0 ms"}


def test_hooks_are_asked_for_before_ttnn_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import sys
    from types import SimpleNamespace

    monkeypatch.delenv(DEVICE, raising=False)
    monkeypatch.setenv("TTNN_CONFIG_OVERRIDES", '{"enable_logging": true}')
    monkeypatch.delitem(sys.modules, "ttnn", raising=False)
    prepare(None)
    assert os.environ["TTNN_CONFIG_OVERRIDES"] == '{"enable_logging": true, "enable_fast_runtime_mode": false}'
    monkeypatch.setitem(sys.modules, "ttnn", SimpleNamespace(CONFIG=SimpleNamespace(enable_fast_runtime_mode=True)))
    with pytest.raises(RequestError, match="without its hooks"):
        prepare(None)


def test_contract_errors_come_before_a_device_is_opened(emulated: None) -> None:
    with pytest.raises(ContractError, match="D=5"):
        tt.load_model(TINY, 5)
    config = dataclasses.replace(Qwen3MoeConfig.from_directory(TINY), num_attention_heads=12)
    said = "got 12 query heads on 1x8; expected a D that divides the query heads, .*; to fix it: --mesh 1x6"
    for asked in (lambda: check_mesh(config, 8), lambda: check(config, 1, Options(mesh="1x8"))):
        with pytest.raises(ContractError, match=said):
            asked()
    assert tenstorrent.device.current() is None
