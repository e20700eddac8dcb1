"""ttnn-moe quantize: what it makes, what it refuses, what a killed run leaves, and how the result loads."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from command import run
from paths import ROOT, TINY
from processes import run_python
from qwen3_checkpoints import make
from ttnn_moe import Problem, Routing, decoder, registry
from ttnn_moe.errors import BackendUnavailable, CheckpointError, RequestError
from ttnn_moe.formats import quantise_mxfp4
from ttnn_moe.formats.quantise_int4_24 import quantise_experts
from ttnn_moe.models.qwen3 import Qwen3Moe, Qwen3MoeConfig, load_model
from ttnn_moe.models.qwen3.bench import memory_needed
from ttnn_moe.models.qwen3.checkpoint import Checkpoint, slots
from ttnn_moe.models.qwen3.layers import MoE
from ttnn_moe.models.qwen3.quantize import convert, quantize_model
from ttnn_moe.models.qwen3.tt.sizes import model_sizes
from ttnn_moe.models.qwen3.weight_formats import UNFINISHED
from ttnn_moe.models.qwen3.weights import randomize
from ttnn_moe.reference import ReferenceBackend

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 32,
    "moe_intermediate_size": 64,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
}
TEXT = "The quick brown fox jumps over the lazy dog. 1234567890 " * 40


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTNN_MOE_BACKEND", "reference")


def made(directory: Path, dtype: torch.dtype = torch.bfloat16, shards: str = "5GB", **changes: Any) -> Path:
    make(directory, dtype, shards, **{**SIZES, **changes})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, directory)
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("random") / "model")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, converted; tests copy it before they change it."""
    out = tmp_path_factory.mktemp("plain") / "out"
    quantize_model(model, out, device="cpu")
    return out


@pytest.fixture
def out(plain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "out"))


def mixtures(network: Qwen3Moe) -> list[MoE]:
    return [module for module in network.modules() if isinstance(module, MoE)]


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def fuse(directory: Path) -> None:
    """Store the experts as transformers 5 holds them."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in sorted({match[1] for key in tensors if (match := re.match(r"(.*\.experts\.)\d+\.", key))}):
        gate, up, down = (
            torch.stack([tensors.pop(f"{name}{e}.{part}_proj.weight") for e in range(SIZES["num_experts"])])
            for part in ("gate", "up", "down")
        )
        tensors[name + "gate_up_proj"], tensors[name + "down_proj"] = torch.cat((gate, up), dim=1), down
    save_file(tensors, path)


@pytest.mark.parametrize("form", ["bf16", "fp32", "sharded", "fused", "tied", "mxfp4"])
def test_the_experts_are_those_of_quantise_experts_and_the_rest_stays(form: str, tmp_path: Path) -> None:
    weights, quantised_of = (
        ("mxfp4", quantise_mxfp4.quantise_experts) if form == "mxfp4" else ("int4_24", quantise_experts)
    )
    dtype = torch.float32 if form == "fp32" else torch.bfloat16
    shards = "60KB" if form == "sharded" else "5GB"
    source = made(tmp_path / "model", dtype, shards, tie_word_embeddings=form == "tied")
    if form == "fused":
        fuse(source)
    out = tmp_path / "new" / "out"
    steps: list[tuple[int, int]] = []
    report = quantize_model(source, out, weights, device="cpu", progress=lambda *step: steps.append(step))
    assert (report.shards, report.kept) == (4, 0)
    assert steps == [(n, 10) for n in range(1, 11)]  # 3 experts in each of two layers, 4 shards
    dense, quantised = load_model(source), load_model(out)
    for before, after in zip(mixtures(dense), mixtures(quantised), strict=True):
        want = quantised_of(before.experts)
        assert after.experts.format == weights
        assert all(torch.equal(after.experts.tensors[name], tensor) for name, tensor in want.tensors.items())
    others = {name: tensor for name, tensor in slots(quantised).items() if ".experts." not in name}
    was = slots(dense)
    assert others and all(torch.equal(tensor, was[name]) for name, tensor in others.items())
    written, source_config = (json.loads((d / "config.json").read_text()) for d in (out, source))
    assert written.pop("quantization_config")["format"] == weights and written == source_config
    assert Checkpoint(out).nbytes == report.nbytes < Checkpoint(source).nbytes
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert not (out / UNFINISHED).exists()


def inputs_of(network: Qwen3Moe, ids: torch.Tensor) -> list[tuple[torch.Tensor, Routing]]:
    """What each layer with experts gets."""
    found = []

    def see(mlp: MoE, arguments: tuple[Any, ...]) -> None:
        x, norm, _ = arguments
        routed = decoder.norm_route(x, norm.weight, norm.eps, mlp.router.weight, mlp.K, mlp.norm_topk_prob)
        found.append((routed[2], Routing.from_topk(*routed[:2], mlp.router.out_features)))

    hooks = [mlp.register_forward_pre_hook(see) for mlp in mixtures(network)]
    network(ids)
    for hook in hooks:
        hook.remove()
    return found


def test_calibration_reads_the_quantised_layers_outputs(tmp_path: Path, text: Path) -> None:
    source = made(tmp_path / "model", torch.float32, max_position_embeddings=128)
    report = quantize_model(source, tmp_path / "out", calibrate=text, tokens=300, device="cpu")
    assert report.fewest is not None and 0 < report.fewest < 300
    dense, quantised = load_model(source), load_model(tmp_path / "out")
    ids = convert.Calibration.of_file(text, source, dense.config, 300).batches[0]
    assert ids.shape == (2, 128)
    whole = tmp_path / "whole"
    report = quantize_model(source, whole, calibrate=text, tokens=256, device="cpu")
    inputs = inputs_of(load_model(whole), ids)  # as the quantised model computes them
    assert report.fewest == min(int(routing.ids.flatten().bincount().min()) for _, routing in inputs)
    for i, (before, after) in enumerate(zip(mixtures(dense), mixtures(load_model(whole)), strict=True)):
        want = quantise_experts(before.experts, *inputs[i]).tensors
        for name, words in after.experts.tensors.items():
            same = (words == want[name]).float().mean()  # the second layer's inputs differ in their last bits
            assert same == 1 if i == 0 else same > 0.9, (i, name, same)
    pairs = zip(slots(quantised).values(), slots(load_model(whole)).values(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs)


def test_torchs_default_dtype_changes_no_byte(model: Path, text: Path, tmp_path: Path) -> None:
    quantize_model(model, tmp_path / "want", calibrate=text, tokens=200, device="cpu")
    before = torch.get_default_dtype()
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            quantize_model(model, tmp_path / str(dtype), calibrate=text, tokens=200, device="cpu")
        finally:
            torch.set_default_dtype(before)
        assert files(tmp_path / str(dtype)) == files(tmp_path / "want")


@pytest.mark.slow(20)
def test_a_killed_conversion_is_finished_by_the_next(model: Path, text: Path, tmp_path: Path) -> None:
    script = ROOT / "tests" / "support" / "quantize_kills.py"
    kills = os.environ.get("TTNN_MOE_FUZZ", "5")
    done = run_python(script, model, tmp_path, text, kills, OMP_NUM_THREADS="1", TTNN_MOE_BACKEND="reference")
    assert done.stdout.count("shards kept") == 2


@pytest.mark.parametrize("harm", ["truncated", "flipped bit", "header", "empty", "absent"])
def test_damaged_shards_are_made_again(harm: str, model: Path, plain: Path, out: Path) -> None:
    name = "model-00003-of-00004.safetensors"
    content = bytearray((out / name).read_bytes())
    if harm == "flipped bit":
        content[-5] ^= 4
    elif harm == "header":
        content[20] ^= 255
    else:
        content = content[: {"truncated": -1, "empty": 0}.get(harm)]
    (out / name).write_bytes(content)
    if harm == "absent":
        (out / name).unlink()
    with pytest.raises(CheckpointError, match=r"model-00003.*checksum" if harm == "flipped bit" else "model-00003"):
        load_model(out)
    (out / ".model-00001.0123456789abcdef.part").write_bytes(b"left by a killed writer")
    steps: list[tuple[int, int]] = []
    assert quantize_model(model, out, device="cpu", progress=lambda *step: steps.append(step)).kept == 3
    assert steps == [(n, 10) for n in (4, 5, 6, 7, 8, 9, 10)]
    assert files(out) == files(plain)


def test_an_unfinished_directory_is_no_checkpoint(model: Path, out: Path) -> None:
    (out / "config.json").rename(out / UNFINISHED)
    (out / UNFINISHED).write_text(json.dumps(json.loads((out / UNFINISHED).read_text())["quantization_config"]))
    with pytest.raises(CheckpointError, match="unfinished.*the same command"):
        load_model(out)


def test_scales_are_checked_when_a_model_is_loaded(out: Path) -> None:
    path = out / "model-00003-of-00004.safetensors"
    tensors = load_file(path)
    words = tensors["model.layers.2.mlp.experts.w2"]
    words[1, 0, 5, 1] = 0x7FC0 << 48
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"layer 2 of .* is damaged: w2.*expert 1, row 5, group 1 \(channels 32"):
        load_model(out)


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
    "no text": (empty_text, "cannot calibrate.*no tokens; expected a text of at least one token; to fix it"),
    "fewer tokens than one": (
        lambda *_: {"calibrate": ROOT / "LICENSE", "tokens": -5},
        "tokens is out of range; got tokens=-5; expected an integer, 1",
    ),
    "an absent text": (lambda out, tmp: {"calibrate": tmp / "none"}, "none cannot be read"),
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


def test_a_device_without_values_is_refused_before_anything_is_written(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="holds no values; got meta"):
        quantize_model(model, tmp_path / "new", device="meta")
    assert not (tmp_path / "new").exists()


def test_two_conversions_do_not_write_to_one_directory(model: Path, out: Path) -> None:
    handle = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(RequestError, match="is being written; got another conversion, in .*or in another"):
            quantize_model(model, out, device="cpu")
    finally:
        os.close(handle)


def test_a_full_disk_is_refused_before_any_shard(model: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 1000))
    with pytest.raises(
        RequestError, match=r"too full; got 1000 bytes free; expected \d+.\d+ [KM]iB; to fix it: make room for "
    ):
        quantize_model(model, tmp_path / "out", device="cpu")
    assert not list((tmp_path / "out").iterdir())


def test_a_disk_that_fills_meanwhile_is_named_and_the_next_run_finishes(
    model: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, fsync = tmp_path / "out", os.fsync

    def full(handle: int) -> None:
        if "model-00003" in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # names no file, as one of a write
        fsync(handle)

    with (
        monkeypatch.context() as patch,
        pytest.raises(RequestError, match=r"out/model-00003-\S+ cannot be written; got No space left .* make room"),
    ):
        patch.setattr(os, "fsync", full)
        quantize_model(model, out, device="cpu")
    assert quantize_model(model, out, device="cpu").kept == 2
    assert files(out) == files(plain)


def test_each_file_is_on_the_disk_before_it_has_its_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut leaves a file of zeros with the name of a whole one."""
    out, seen, fsync, replace = tmp_path / "out", [], os.fsync, Path.replace

    def synced(handle: int) -> None:
        seen.append(Path(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def renamed(part: Path, target: Path) -> Path:
        assert seen[-1] == part
        seen.append(target)
        return replace(part, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    before = os.listdir("/proc/self/fd")
    quantize_model(model, out, device="cpu")
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert seen[2::3] == [out] * (len(seen) // 3)  # a file, its name, the directory
    assert {path.name for path in seen[1::3]} == {*files(out), UNFINISHED}


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("/proc/x", "the directory /proc/x cannot be made; got No such file .*another --out"),
        ("/dev/null/x", "x cannot be written; got /dev/null, a file; expected another directory"),
        ("/tmp/" + "a" * 300, "cannot be made; got File name too long; .*another --out"),
    ],
)
def test_a_directory_that_cannot_be_made_is_named(out: str, words: str, model: Path) -> None:
    with pytest.raises(RequestError, match=words):
        quantize_model(model, out, device="cpu")


def test_an_interrupt_does_not_wait_for_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a model are gigabytes."""

    class Slow:
        pieces = 0

        def update(self, piece: bytes) -> None:
            self.pieces += 1
            if self.pieces == 1:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.2)

    monkeypatch.setattr(convert.hashlib, "sha256", Slow)
    (tmp_path / "config.json").write_text("{}")
    large = tmp_path / "model.safetensors"
    with large.open("wb") as file:
        file.truncate(40 << 24)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        convert.fingerprint(SimpleNamespace(directory=tmp_path, headers={"w": {"file": large}}))
    assert time.monotonic() - start < 4


def test_a_directory_of_another_user_is_refused_before_the_model_is_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path or mode != os.W_OK | os.X_OK)
    monkeypatch.setattr(convert, "Checkpoint", None)
    with pytest.raises(RequestError, match=r"cannot be made; got \S+: Permission denied; .*another --out"):
        quantize_model(model, tmp_path / "a" / "b", device="cpu")


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


@pytest.mark.parametrize(
    "given, match",
    [
        ({"quant_method": "awq"}, "quant_method 'awq'"),
        ({"quant_method": "ttnn_moe", "format": "int3", "version": 1}, "unknown format; got format 'int3', version 1"),
        ({"quant_method": "ttnn_moe", "format": "int4_24", "version": 2}, "version 2; expected one of"),
        ({"quant_method": "ttnn_moe", "format": "dense", "version": 1}, "unknown format"),
        ({"quant_method": "ttnn_moe", "version": 1}, "format in quantization_config of .* must be text"),
    ],
)
def test_a_config_of_another_format_is_refused(given: dict[str, Any], match: str, out: Path) -> None:
    values = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**values, "quantization_config": given}))
    with pytest.raises(CheckpointError, match=match):
        load_model(out)


def test_a_dtype_that_words_do_not_have_is_refused(out: Path) -> None:
    path = out / "model-00003-of-00004.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "model.layers.2.mlp.experts.w2": tensors["model.layers.2.mlp.experts.w2"].double()}, path)
    with pytest.raises(CheckpointError, match=r"wrong dtype of model.layers.2.mlp.experts.w2: F64.*\['I64'\]"):
        load_model(out)


def test_a_backend_that_does_not_run_the_format_is_refused_before_weights_are_read(plain: Path, monkeypatch) -> None:
    def refuses(self: ReferenceBackend, problem: Problem) -> str | None:
        return "no words here" if problem.weight_format == "int4_24" else None

    monkeypatch.setattr(ReferenceBackend, "why_not", refuses)
    registry._choose.cache_clear()
    monkeypatch.setattr(Checkpoint, "read", None)
    with pytest.raises(BackendUnavailable, match="no words here"):
        load_model(plain)
    registry._choose.cache_clear()
    with pytest.raises(CheckpointError, match="backend tenstorrent does not run; got int4_24"):
        model_sizes(Qwen3MoeConfig.from_directory(plain))


def test_random_words_have_the_standard_deviation_of_random_weights(plain: Path) -> None:
    config = Qwen3MoeConfig.from_directory(plain)
    network = Qwen3Moe.empty(config, "reference", torch.bfloat16, "cpu")
    randomize(network)
    gate_up, down = mixtures(network)[0].experts.dequantize(0)
    assert 0.018 < gate_up.std() < 0.022 and 0.018 < down.std() < 0.022
    words = sum(mlp.w13.nbytes + mlp.w2.nbytes for mlp in mixtures(network))
    bf16, fp32 = (memory_needed(config, dtype, 1, 8, 8, 64)["weights"] for dtype in (torch.bfloat16, torch.float32))
    assert fp32 - words == 2 * (bf16 - words)


def test_generate_runs_what_the_command_makes(model: Path, text: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    out = tmp_path / "out"
    arguments = ["--model", str(model), "--out", str(out), "--calibrate", str(text), "--device", "cpu"]
    for kept in (0, 4):
        assert run(monkeypatch, "quantize", *arguments) == 0
        assert f"4, {kept} of them kept" in capsys.readouterr().out
    assert run(monkeypatch, "generate", "--model", str(out), "--prompt", "a", "--max-new-tokens", "3") == 0
    assert "new tokens" in capsys.readouterr().err
    assert run(monkeypatch, "quantize", "--format", "int4_24", "--model", str(model), "--out", str(out)) == 2
    assert "holds another conversion" in capsys.readouterr().err
