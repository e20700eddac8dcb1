"""The bundled checkpoint converted to MXFP4: what it can do without training, and what its loader refuses."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from command import run
from interrupts import each_interrupt
from tiny_answers import check_every_task
from ttnn_moe import arranging
from ttnn_moe.errors import CheckpointError
from ttnn_moe.formats import in_place, mxfp4_boxes
from ttnn_moe.models.qwen3 import TINY, TINY_INT4_24, Qwen3Moe, Qwen3MoeConfig, layers, load_model
from ttnn_moe.models.qwen3.layers import MoE
from ttnn_moe.models.qwen3.quantize import quantize_model
from ttnn_moe.models.qwen3.weights import randomize

NEEDED = 0.93


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mxfp4") / "out"
    quantize_model(TINY, out, "mxfp4", device="cpu")
    return out


@pytest.fixture(scope="module")
def model(converted: Path) -> Qwen3Moe:
    return load_model(converted, "reference", "cpu")


def mixtures(network: Qwen3Moe) -> list[MoE]:
    return [module for module in network.modules() if isinstance(module, MoE)]


def test_the_experts_have_four_bits_and_a_quarter_a_weight(model: Qwen3Moe) -> None:
    experts = [mlp.experts for mlp in mixtures(model)]
    assert [one.format for one in experts] == ["mxfp4", "mxfp4"]
    weights = sum(3 * one.E * one.H * one.I for one in experts)
    assert sum(tensor.nbytes for one in experts for tensor in one.tensors.values()) * 8 == 4.25 * weights


def test_every_task_is_answered_without_training(model: Qwen3Moe, converted: Path) -> None:
    check_every_task(model, converted, NEEDED)


def test_arranged_experts(model: Qwen3Moe, converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Hopper GPU: the same logits; state dicts and copies have the tensors of files."""
    tokens = torch.arange(1, 9)[None]
    want, state = model(tokens), model.state_dict()
    monkeypatch.setattr("ttnn_moe.arranging.gains", lambda experts: experts.format == "mxfp4")
    other = load_model(converted, "reference", "cpu")
    for network in (other, copy.deepcopy(other), other.to(torch.bfloat16)):
        assert torch.equal(network(tokens).to(want.dtype), want)
        assert {mlp.experts.format for mlp in mixtures(network)} == {"mxfp4_boxes"}
        for name, tensor in network.state_dict().items():
            assert torch.equal(tensor, state[name].to(tensor.dtype)), name
    other.load_state_dict(state)
    assert torch.equal(other(tokens).to(want.dtype), want)


@pytest.mark.parametrize("kind", ["dense", "int4_24", "mxfp4"])
def test_what_captured_steps_hold_stays_where_weights_are_loaded_in_place(
    kind: str, converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They replay with the memory of the prepared layer, and with the order of bytes that it knows."""
    monkeypatch.setattr("ttnn_moe.arranging.gains", lambda experts: experts.format == "mxfp4")
    folder = {"dense": TINY, "int4_24": TINY_INT4_24, "mxfp4": converted}[kind]
    mlp, other = (mixtures(load_model(folder, "reference", "cpu"))[0] for _ in range(2))
    state = {name: tensor.flip(0) for name, tensor in mlp.state_dict().items()}
    prepared = mlp.prepared(2)
    for each in (mlp, other):
        each.load_state_dict(state)
    x, weights = torch.randn(2, mlp.router.in_features).to(mlp.router.weight.dtype), torch.ones(2, 2)
    call = x, torch.tensor([[0, 1], [2, 3]]), weights
    assert torch.equal(prepared(*call), other.prepared(2)(*call))
    assert mlp.prepared(2) is prepared
    mlp.load_state_dict(state, assign=True)
    assert mlp.prepared(2) is not prepared


def test_a_state_dict_that_is_assigned_keeps_its_bytes(
    model: Qwen3Moe, converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model may load it, too."""
    tokens = torch.arange(1, 9)[None]
    want, state = model(tokens), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    monkeypatch.setattr("ttnn_moe.arranging.gains", lambda experts: experts.format == "mxfp4")
    for _ in range(2):
        other = load_model(converted, "reference", "cpu")
        other.load_state_dict(state, assign=True)
        assert torch.equal(other(tokens), want)
        assert {mlp.experts.format for mlp in mixtures(other)} == {"mxfp4_boxes"}


def test_a_layer_knows_its_bytes_wherever_an_interrupt_comes(
    model: Qwen3Moe, converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, mlp = (mixtures(network)[0] for network in (model, load_model(converted, "reference", "cpu")))
    x = torch.randn(2, plain.router.in_features).to(plain.router.weight.dtype)
    ids, weights = torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2)
    state, want = plain.state_dict(), plain.add_experts(x, ids, weights, x, None)
    monkeypatch.setattr("ttnn_moe.arranging.gains", lambda experts: experts.format == "mxfp4")

    def check() -> None:
        assert all(torch.equal(tensor, state[name]) for name, tensor in mlp.state_dict().items())
        assert torch.equal(mlp.add_experts(x, ids, weights, x, None), want)

    modules = in_place, mxfp4_boxes, arranging, layers
    assert each_interrupt(lambda: (mlp._restore(), mlp.experts), check, *modules) > 100
    assert mlp.experts.format == "mxfp4_boxes"


def test_random_codes_have_the_standard_deviation_of_random_weights(converted: Path) -> None:
    network = Qwen3Moe.empty(Qwen3MoeConfig.from_directory(converted), "reference", torch.bfloat16, "cpu")
    randomize(network)
    gate_up, down = mixtures(network)[0].experts.dequantize(0)
    assert 0.0195 < gate_up.std() < 0.0205 and 0.0195 < down.std() < 0.0205
    assert abs(float(down.mean())) < 0.001


def nan_scale(tensors: dict[str, torch.Tensor], prefix: str) -> None:
    tensors[prefix + "down_proj_scales"][1, 5, 2] = 0xFF


def another_dtype(tensors: dict[str, torch.Tensor], prefix: str) -> None:
    tensors[prefix + "gate_up_proj_blocks"] = tensors[prefix + "gate_up_proj_blocks"].long()


def another_shape(tensors: dict[str, torch.Tensor], prefix: str) -> None:
    tensors[prefix + "down_proj_blocks"] = tensors[prefix + "down_proj_blocks"][..., 1:].contiguous()


@pytest.mark.parametrize(
    "harm, match",
    [
        (nan_scale, r"layer \d of .* is damaged: down_scales.*0xFF for expert 1, row 5, group 2 \(channels 64 to 95\)"),
        (another_dtype, r"wrong dtype of .*gate_up_proj_blocks: I64, expected one of \['U8'\]"),
        (another_shape, r"mis-shaped .*down_proj_blocks"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_damaged_tensors_are_refused(harm, match: str, converted: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(converted, tmp_path / "out"))
    path = next(p for p in sorted(out.glob("*.safetensors")) if any("_blocks" in name for name in load_file(p)))
    tensors = load_file(path)
    prefix = next(name for name in tensors if name.endswith("down_proj_blocks")).removesuffix("down_proj_blocks")
    harm(tensors, prefix)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=match):
        load_model(out)


def test_the_commands(converted: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    out = tmp_path / "out"
    assert run(monkeypatch, "quantize", "--format", "mxfp4", "--model", str(TINY), "--out", str(out)) == 0
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {p.name: p.read_bytes() for p in converted.iterdir()}
    monkeypatch.setenv("TTNN_MOE_BACKEND", "reference")
    assert run(monkeypatch, "generate", "--model", str(out), "--prompt", "a", "--max-new-tokens", "3") == 0
    assert "new tokens" in capsys.readouterr().err
