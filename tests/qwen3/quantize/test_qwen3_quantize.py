"""ttnn-moe quantize: what it makes, and how the result loads."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from command import run
from quantize_models import SIZES, files, made
from torch_defaults import defaults
from ttnn_moe import Problem, Routing, decoder, registry
from ttnn_moe.errors import BackendUnavailable, CheckpointError
from ttnn_moe.formats import quantise_mxfp4
from ttnn_moe.formats.quantise_int4_24 import quantise_experts
from ttnn_moe.models.qwen3 import Qwen3Moe, Qwen3MoeConfig, load_model
from ttnn_moe.models.qwen3.bench import memory_needed
from ttnn_moe.models.qwen3.checkpoint import Checkpoint, slots
from ttnn_moe.models.qwen3.files import MOST_BYTES
from ttnn_moe.models.qwen3.layers import MoE
from ttnn_moe.models.qwen3.quantize import convert, quantize_model
from ttnn_moe.models.qwen3.tt.sizes import model_sizes
from ttnn_moe.models.qwen3.weight_formats import UNFINISHED
from ttnn_moe.models.qwen3.weights import randomize
from ttnn_moe.reference import ReferenceBackend


def mixtures(network: Qwen3Moe) -> list[MoE]:
    return [module for module in network.modules() if isinstance(module, MoE)]


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


def test_what_belongs_to_the_text_comes_along_and_nothing_else(tmp_path: Path) -> None:
    source, out = made(tmp_path / "model"), tmp_path / "out"
    more = ("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "LICENSE")
    for name in (*more, "notes.txt"):
        (source / name).write_text(f"of {name}")
    quantize_model(source, out, device="cpu")
    for name in (*more, "tokenizer_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert not (out / "notes.txt").exists()


def test_a_model_is_known_by_its_config_and_by_every_byte_of_its_files_in_their_order(tmp_path: Path) -> None:
    """Another formula would refuse to go on with conversions that were begun before."""
    source = made(tmp_path / "model", shards="20KB")
    digests = [sha256(path.read_bytes()).hexdigest() for path in sorted(source.glob("*.safetensors"))]
    assert len(digests) > 4
    config = json.dumps(json.loads((source / "config.json").read_text()), sort_keys=True)
    want = sha256("\n".join([config, *digests]).encode()).hexdigest()
    assert convert.fingerprint(Checkpoint(source)) == want


def test_the_memory_that_a_conversion_asks_for(tmp_path: Path, text: Path) -> None:
    """Three times the largest shard, an expert in fp32 with its search, and the calibration's hidden states."""
    source, out = made(tmp_path / "model"), tmp_path / "out"
    plain = convert.Conversion(source, out, device="cpu")
    calibrated = convert.Conversion(source, out, calibrate=text, tokens=300, device="cpu")
    plain.run()
    shards = [load_file(path).values() for path in out.glob("*.safetensors")]
    H = I = SIZES["hidden_size"]
    assert plain.memory == 3 * max(sum(tensor.nbytes for tensor in shard) for shard in shards) + 3 * H * I * 64
    assert calibrated.memory - plain.memory == 300 * H * 16 + 50 * H * H


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
    source = made(tmp_path / "model", torch.float32, max_position_embeddings=128, num_hidden_layers=4)
    report = quantize_model(source, tmp_path / "out", calibrate=text, tokens=300, device="cpu")
    assert report.fewest is not None and 0 < report.fewest < 300
    dense, quantised = load_model(source), load_model(tmp_path / "out")
    ids = convert.Calibration.of_file(text, source, dense.config, 300).batches[0]
    assert ids.shape == (2, 128)
    whole = tmp_path / "whole"
    report = quantize_model(source, whole, calibrate=text, tokens=256, device="cpu")
    inputs = inputs_of(load_model(whole), ids)  # as the quantised model computes them
    assert report.fewest == min(int(routing.ids.flatten().bincount().min()) for _, routing in inputs)
    again = quantize_model(source, whole, calibrate=text, tokens=256, device="cpu")
    assert again.kept == again.shards and again.fewest is None, "nothing is left to quantise"
    (whole / "model-00001-of-00005.safetensors").unlink()
    again = quantize_model(source, whole, calibrate=text, tokens=256, device="cpu")
    assert again.kept == 4 and again.fewest is None, "later layers have experts, too"
    for i, (before, after) in enumerate(zip(mixtures(dense), mixtures(load_model(whole)), strict=True)):
        want = quantise_experts(before.experts, *inputs[i]).tensors
        for name, words in after.experts.tensors.items():
            same = (words == want[name]).float().mean()  # the second layer's inputs differ in their last bits
            assert same == 1 if i == 0 else same > 0.9, (i, name, same)
    pairs = zip(slots(quantised).values(), slots(load_model(whole)).values(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_hidden_states_of_a_calibration_are_those_of_the_quantised_model(
    norm_topk_prob: bool, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = made(tmp_path / "model", torch.float32, max_position_embeddings=128, norm_topk_prob=norm_topk_prob)
    hidden: list[torch.Tensor] = []
    attend = convert.Activations.attend

    def seen(activations: convert.Activations, i: int) -> convert.Routed | None:
        routed = attend(activations, i)
        hidden.extend([] if routed is None else [routed.hidden])
        return routed

    monkeypatch.setattr(convert.Activations, "attend", seen)
    quantize_model(source, tmp_path / "out", calibrate=text, tokens=256, device="cpu")
    network = load_model(tmp_path / "out")
    (ids,) = convert.Calibration.of_file(text, source, network.config, 256).batches
    for got, (want, _) in zip(hidden, inputs_of(network, ids), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_as_much_of_a_text_is_read_as_has_the_tokens(model: Path, text: Path, tmp_path: Path) -> None:
    """A text of any size, and one without an end."""
    config = load_model(model).config
    want = convert.Calibration.of_file(text, model, config, 20).digest
    large = shutil.copy(text, tmp_path / "large")
    os.truncate(large, MOST_BYTES + 1)
    assert convert.Calibration.of_file(large, model, config, 20).digest == want
    os.mkfifo(tmp_path / "pipe")

    def write() -> None:
        with suppress(BrokenPipeError), (tmp_path / "pipe").open("w", encoding="utf-8") as pipe:
            while True:
                pipe.write(text.read_text())

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    assert convert.Calibration.of_file(tmp_path / "pipe", model, config, 20).digest == want
    thread.join(60)
    assert not thread.is_alive()


def test_torchs_defaults_and_autocast_change_no_byte(model: Path, text: Path, tmp_path: Path) -> None:
    quantize_model(model, tmp_path / "want", calibrate=text, tokens=200, device="cpu")
    for given in ((torch.bfloat16, None), (torch.float64, None), (None, "meta")):
        with defaults(*given):
            quantize_model(model, tmp_path / str(given), calibrate=text, tokens=200, device="cpu")
        assert files(tmp_path / str(given)) == files(tmp_path / "want")
    with torch.autocast("cpu", torch.bfloat16):
        quantize_model(model, tmp_path / "autocast", calibrate=text, tokens=200, device="cpu")
    assert files(tmp_path / "autocast") == files(tmp_path / "want")


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
        told = capsys.readouterr().out
        assert f"4, {kept} of them kept" in told
        assert ("; enough: several times 64" in told) == (kept == 0), "nothing was calibrated the second time"
    assert run(monkeypatch, "generate", "--model", str(out), "--prompt", "a", "--max-new-tokens", "3") == 0
    assert "new tokens" in capsys.readouterr().err
    assert run(monkeypatch, "quantize", "--format", "int4_24", "--model", str(model), "--out", str(out)) == 2
    assert "holds another conversion" in capsys.readouterr().err
