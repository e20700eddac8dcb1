"""ttnn-moe quantize: models, arguments and folders that it refuses, and that it changes no file then."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paths import ROOT, TINY
from quantize_models import files, made
from ttnn_moe.errors import CheckpointError, RequestError
from ttnn_moe.models.qwen3.quantize import convert, quantize_model


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"moe_intermediate_size": 48}, "does not fit int4_24; got I = 48: not a multiple of 64"),
        ({"hidden_size": 96, "moe_intermediate_size": 32}, "H = 96 and I = 32"),
        ({"mlp_only_layers": [0, 1, 2]}, "no experts to quantise; got dense layers only"),
    ],
)
def test_models_that_do_not_fit_are_refused(changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    source = made(tmp_path / "model", **changes)
    with pytest.raises(CheckpointError, match=match):
        quantize_model(source, tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


def other_model(out: Path, tmp_path: Path) -> dict[str, Any]:
    source = made(tmp_path / "other")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.2.mlp.experts.0.up_proj.weight"][-1, -1] += 1
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    return {"directory": source}


def other_row(out: Path, tmp_path: Path) -> dict[str, Any]:
    """Neither the first row of a tensor, nor its middle, nor its last."""
    source = made(tmp_path / "other")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.2.mlp.experts.0.up_proj.weight"][1, 3] += 1
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    return {"directory": source}


def other_files(out: Path, tmp_path: Path) -> dict[str, Any]:
    shutil.rmtree(out)
    out.mkdir()
    (out / "thesis.txt").write_text("")
    return {}


def empty_text(out: Path, tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "empty").write_text("")
    return {"calibrate": tmp_path / "empty"}


def quantised(out: Path, tmp_path: Path) -> dict[str, Any]:
    return {"directory": out, "out": tmp_path / "again"}


def empty_config(out: Path, tmp_path: Path) -> dict[str, Any]:
    (out / "config.json").write_text("")
    return {}


OUTS: dict[str, tuple[Callable[[Path, Path], dict[str, Any]], str]] = {
    "another model": (other_model, r"holds another conversion, with another model \(its .*\); got model "),
    "a model with another row": (other_row, r"with another model \(.* a byte of its weights\); got model "),
    "another calibration": (
        lambda out, _: {"calibrate": ROOT / "LICENSE"},
        r"with another calibration \(its text, --tokens or the tokenizer\); got calibration none",
    ),
    "other files": (other_files, r"holds other files; got .*thesis\.txt.*another --out"),
    "a dense model": (lambda out, _: {"out": TINY}, "holds other files; got config.json of a model that is not"),
    "the result itself": (lambda out, _: {"directory": out}, "cannot be written; got the model itself"),
    "a result as the model": (quantised, "no experts to quantise; got experts in int4_24"),
    "an empty config.json": (
        empty_config,
        "out/config.json cannot be read; got .*; to fix it: another --out, or remove",
    ),
    "no out": (lambda *_: {"out": None}, "out is no path; got None; .*; to fix it: name the directory to make"),
    "an out of no file system": (lambda *_: {"out": "\0"}, "names no file; got a null character; .*directory to make"),
    "no text": (empty_text, "cannot calibrate.*no tokens; expected a text of at least one token; to fix it"),
    "fewer tokens than one": (
        lambda *_: {"calibrate": ROOT / "LICENSE", "tokens": -5},
        "tokens is out of range; got tokens=-5; expected an integer, 1",
    ),
    "an absent text": (lambda out, tmp: {"calibrate": tmp / "none"}, "none cannot be read; .*; to fix it: name a text"),
    "a folder as the text": (
        lambda out, tmp: {"calibrate": tmp},
        "cannot be read; got IsADirectoryError.*; to fix it: name a text file",
    ),
    "a text for a format without calibration": (
        lambda *_: {"format": "mxfp4", "calibrate": ROOT / "LICENSE"},
        "mxfp4 is not calibrated; got the text .*LICENSE; to fix it: .* another format: int4_24\\.$",
    ),
    "no such format": (
        lambda out, _: {"format": "int3"},
        r"unknown format; got 'int3'; expected one of \['int4_24', 'mxfp4'\]",
    ),
    "an odd text": (
        lambda *_: {"calibrate": 3},
        "calibrate is no path; got 3; expected a path.*; to fix it: name a text",
    ),
    "an odd device": (
        lambda *_: {"device": []},
        r"device is no device; got device=\[\]; expected .*; to fix it: leave device out",
    ),
    "no such device": (lambda out, _: {"device": "cuda:99"}, "no device cuda:99 here"),
    "no checkpoint": (lambda out, tmp: {"directory": tmp}, "not a checkpoint: it has no config.json"),
}


@pytest.mark.parametrize("case", OUTS)
def test_what_does_not_belong_together_is_refused(case: str, model: Path, out: Path, tmp_path: Path) -> None:
    change, match = OUTS[case]
    arguments = {"directory": model, "out": out, "device": "cpu", **change(out, tmp_path)}
    before = files(out)
    with pytest.raises((CheckpointError, RequestError), match=match):
        quantize_model(**arguments)
    assert files(out) == before


def test_a_tied_head_that_differs_is_refused_as_when_it_is_loaded(tmp_path: Path) -> None:
    source = made(tmp_path / "model", tie_word_embeddings=True)
    tensors = load_file(source / "model.safetensors")
    for change in (0, 1):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + change
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match="holds a lm_head.weight of its own") if change else nullcontext():
            convert.Conversion(source, tmp_path / "out", device="cpu")


def test_a_shard_of_another_conversion_is_not_kept(model: Path, out: Path, tmp_path: Path) -> None:
    quantize_model(other_model(out, tmp_path)["directory"], tmp_path / "theirs", device="cpu")
    shutil.copy(tmp_path / "theirs" / "model-00003-of-00004.safetensors", out)
    with pytest.raises(
        RequestError, match="model-00003-of-00004.safetensors is of another conversion; got .*another --"
    ):
        quantize_model(model, out, device="cpu")


def test_a_model_is_not_its_own_result(model: Path) -> None:
    with pytest.raises(RequestError, match="cannot be written; got the model itself"):
        quantize_model(model, model / ".." / "model", device="cpu")


@pytest.mark.parametrize("where", ["loop", "loop/x"])
def test_a_loop_of_links_is_no_place(model: Path, tmp_path: Path, where: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(RequestError, match="cannot be (made|written)"):
        quantize_model(model, tmp_path / where, device="cpu")
    with pytest.raises(CheckpointError, match="loop"):
        quantize_model(tmp_path / "loop", tmp_path / "z", device="cpu")


@pytest.mark.parametrize("where", ["link", "link/x"])
def test_a_link_to_nothing_is_refused_before_the_model_is_read(
    model: Path, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to("nothing")
    monkeypatch.setattr(convert, "Checkpoint", None)
    with pytest.raises(RequestError, match=f"{where} cannot be written; got .*/link, a link to nothing, which is not"):
        quantize_model(model, tmp_path / where, device="cpu")


def test_a_path_that_is_no_text_is_refused(model: Path, tmp_path: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff"))
    for given, out in ((model, odd), (odd, tmp_path / "z")):
        with pytest.raises(CheckpointError, match="is not in UTF-8"):
            quantize_model(given, out, device="cpu")
        assert not out.exists()


def test_a_device_without_values_is_refused_before_anything_is_written(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="holds no values; got meta"):
        quantize_model(model, tmp_path / "new", device="meta")
    assert not (tmp_path / "new").exists()


def test_other_files_are_refused_before_the_model_is_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To read a model of 60 GB takes a minute."""
    monkeypatch.setattr(convert, "Checkpoint", None)
    with pytest.raises(RequestError, match="holds other files; got config.json of a model that is not quantised"):
        quantize_model(model, TINY, device="cpu")


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    source = made(tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.2.mlp.experts.1.up_proj.weight"][3, 7] = torch.inf
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"expert 1 of layer 2 .* not all are finite; got inf .* row 67, channel 7"
    ):
        quantize_model(source, tmp_path / "out", device="cpu")
