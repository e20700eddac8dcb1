"""gpt-oss with MXFP4 experts: the loader of its tensors, and stock transformers on a tiny random checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gpt_oss_models import LAYERS, E, H, I, save
from hf_models import batch, experts_of, hf, on_devices, transformers
from interrupts import each_interrupt
from ttnn_moe import Experts, Routing, arranging, moe
from ttnn_moe.errors import CheckpointError, ContractError, GradientsRefused
from ttnn_moe.formats import in_place, mxfp4, mxfp4_boxes
from ttnn_moe.integrations.gpt_oss import PREFIX, load_experts
from ttnn_moe.integrations.gpt_oss import experts_of as experts_from
from ttnn_moe.integrations.transformers import mxfp4 as layouts
from ttnn_moe.integrations.transformers.mxfp4 import Mxfp4Experts
from ttnn_moe.selfcheck.bounds import token_errors


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("gpt_oss"))


def load(folder: Path, dtype: torch.dtype = torch.float32, experts: str | None = "ttnn_moe", **options: Any) -> Any:
    given = {} if experts is None else {"experts_implementation": experts}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **given, **options).eval()


def dequantised(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """MXFP4 weights are exact in bf16, which older versions dequantise to whatever the dtype asked for."""
    model = load(folder, torch.bfloat16, "eager", quantization_config=transformers.Mxfp4Config(dequantize=True))
    return model.to(dtype)


def logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**inputs).logits


def packed(model: nn.Module) -> list[Mxfp4Experts]:
    return [module for module in model.modules() if isinstance(module, Mxfp4Experts)]


def test_logits_and_tokens(checkpoint: Path) -> None:
    """Those of the dequantised eager model, in fp32."""
    model, eager, inputs = load(checkpoint), dequantised(checkpoint), batch()
    assert len(packed(model)) == len(hf.served(model)) + LAYERS == LAYERS and not packed(eager)
    got, want = logits(model, inputs), logits(eager, inputs)
    assert token_errors(got.flatten(0, 1), want.flatten(0, 1)).max() < 1e-5
    assert set(hf.served(model).values()) == {"reference"} and len(hf.served(model)) == LAYERS
    made = [m.generate(**inputs, max_new_tokens=6, do_sample=False) for m in (model, eager)]
    assert torch.equal(*made)


@on_devices
def test_logits_bf16(checkpoint: Path, device: str) -> None:
    """As near to the dequantised model in fp32 as the dequantised eager model in bf16 is."""
    inputs = batch()
    real = inputs["attention_mask"].bool()
    exact, errors = logits(dequantised(checkpoint), inputs)[real], {}
    for name, make in (("eager", dequantised), ("ttnn_moe", load)):
        model = make(checkpoint, torch.bfloat16).to(device)
        got = logits(model, {key: tensor.to(device) for key, tensor in inputs.items()}).cpu()[real]
        errors[name] = float(token_errors(got, exact).median())
    assert errors["ttnn_moe"] < 1.3 * errors["eager"] < 0.1, errors


def test_the_experts_are_never_dequantised(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at load, and no call allocates a quarter of a dequantised layer: one expert is decoded at a time."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights are dequantised")

    for function in ("transformers.integrations.mxfp4.dequantize_convertops", "ttnn_moe.formats.mxfp4.dequantise"):
        monkeypatch.setattr(function, refuse)
    model, inputs = load(checkpoint, torch.bfloat16), batch()
    for module in packed(model):
        bits = {name: tensor for name, tensor in module.named_parameters() if not name.endswith("bias")}
        assert sum(tensor.nbytes for tensor in bits.values()) == E * 3 * H * I * 17 // 32
    logits(model, inputs)
    with torch.profiler.profile(profile_memory=True) as profile:
        logits(model, inputs)
    assert max(event.self_cpu_memory_usage for event in profile.events()) < E * 3 * H * I * 2 // 4


def test_saved_and_loaded_again(checkpoint: Path, tmp_path: Path) -> None:
    model = load(checkpoint, torch.bfloat16)
    model.save_pretrained(tmp_path)
    want, got = load_file(checkpoint / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name].to(tensor.dtype), tensor) for name, tensor in want.items())
    inputs = batch()
    assert torch.equal(logits(load(tmp_path, torch.bfloat16), inputs), logits(model, inputs))


def test_arranged_experts(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Hopper GPU: the same logits, and files, state dicts and deep copies as without."""
    inputs, plain = batch(), load(checkpoint)
    want = logits(plain, inputs)
    monkeypatch.setattr("ttnn_moe.integrations.transformers.mxfp4.gains", lambda experts: experts.device.type == "cpu")
    model = load(checkpoint)
    assert all(module.arranged for module in packed(model)) and torch.equal(logits(model, inputs), want)
    model.save_pretrained(tmp_path)
    got, files = load_file(tmp_path / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(got[name].to(tensor.dtype), tensor) for name, tensor in files.items())
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), model.state_dict().values(), strict=True))
    other = copy.deepcopy(model)
    with torch.no_grad():
        packed(other)[0].down_proj_scales[:] += 1
    assert not torch.equal(logits(other, inputs), want)
    other.load_state_dict(plain.state_dict())
    assert torch.equal(logits(other, inputs), want)
    for _ in range(2):  # what is assigned keeps its bytes
        other.load_state_dict(plain.state_dict(), assign=True)
        assert torch.equal(logits(other, inputs), want) and torch.equal(logits(plain, inputs), want)


def test_arranged_experts_that_accelerate_offloads_are_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It puts the bytes of a state dict in place of the arranged ones."""
    accelerate, inputs = pytest.importorskip("accelerate"), batch()
    plain = load(checkpoint)
    want = logits(plain, inputs)
    accelerate.cpu_offload(plain, execution_device="cpu")
    assert torch.equal(logits(plain, inputs), want)
    monkeypatch.setattr(layouts, "gains", lambda experts: experts.device.type == "cpu")
    model = load(checkpoint)
    assert torch.equal(logits(model, inputs), want)
    accelerate.cpu_offload(model, execution_device="cpu")
    with pytest.raises(ContractError, match="Mxfp4Experts: accelerate offloads its arranged .*device_map="):
        logits(model, inputs)


def test_arranged_experts_stay_so_where_a_load_is_interrupted(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ttnn_moe.integrations.transformers.mxfp4.gains", lambda experts: experts.device.type == "cpu")
    model, inputs = load(checkpoint), batch()
    want, state = logits(model, inputs), model.state_dict()

    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(nn.Module, "_load_from_state_dict", interrupted)
        packed(model)[0].load_state_dict(packed(model)[0].state_dict())
    assert torch.equal(logits(model, inputs), want)
    model.load_state_dict(state)
    assert torch.equal(logits(model, inputs), want)


def test_a_module_knows_its_bytes_wherever_an_interrupt_comes(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "gains", lambda experts: experts.format == "mxfp4")
    module = Mxfp4Experts(load(checkpoint).config)
    state = {name: torch.randint_like(tensor, 250) for name, tensor in module.state_dict().items()}
    module.load_state_dict(state)

    def work() -> None:
        module.arrange()
        module.load_state_dict(state)

    def check() -> None:
        assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())

    assert each_interrupt(work, check, in_place, mxfp4_boxes, arranging, layouts) > 100
    assert module.arranged


def test_experts_that_a_load_leaves_unarranged_are_read_as_they_lie(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call had bound them as arranged."""
    monkeypatch.setattr("ttnn_moe.integrations.transformers.mxfp4.gains", lambda experts: experts.device.type == "cpu")
    model, inputs = load(checkpoint), batch()
    want, state = logits(model, inputs), model.state_dict()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("ttnn_moe.integrations.transformers.mxfp4.arrange", interrupted)
        model.load_state_dict(state)
    assert torch.equal(logits(model, inputs), want)


def test_weights_may_change(checkpoint: Path) -> None:
    """In place, by load_state_dict, and by deep copies: a call uses what is there."""
    model, inputs = load(checkpoint), batch()
    before, other = logits(model, inputs), copy.deepcopy(model)
    with torch.no_grad():
        packed(other)[0].down_proj_scales[:] += 1
    assert not torch.equal(logits(other, inputs), before)
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other, inputs), before) and torch.equal(logits(model, inputs), before)
    packed(other)[0].gate_up_proj_bias = nn.Parameter(packed(other)[0].gate_up_proj_bias * 2)
    assert not torch.equal(logits(other, inputs), before)


def test_compiled(checkpoint: Path) -> None:
    module = packed(load(checkpoint))[0]
    given = torch.randn(3, H), torch.randint(0, E, (3, 2)), torch.rand(3, 2)
    with torch.no_grad():
        assert torch.equal(torch.compile(module, fullgraph=True, backend="eager")(*given), module(*given))
    torch._dynamo.reset()


def test_what_is_not_asked_for_stays_as_it_is(checkpoint: Path) -> None:
    for model in (load(checkpoint, experts=None), load(checkpoint, experts="eager"), dequantised(checkpoint)):
        assert {type(module).__name__ for module in experts_of(model).values()} == {"GptOssExperts"}


def test_experts_that_are_asked_for_dequantised_are_dense_and_refused(checkpoint: Path) -> None:
    model = load(checkpoint, quantization_config=transformers.Mxfp4Config(dequantize=True))
    assert not packed(model)
    with pytest.raises(ContractError, match="cannot serve GptOssExperts: its experts have biases; .*transposed.*inter"):
        logits(model, batch())


def test_generate_may_compile_packed_experts(checkpoint: Path) -> None:
    """transformers asks the quantiser, and compiles decoding with a static cache."""
    model, inputs = load(checkpoint), batch()
    assert model.hf_quantizer.is_compileable
    options = dict(max_new_tokens=4, do_sample=False)
    want = model.generate(**inputs, **options)
    compiled = transformers.CompileConfig(backend="eager", mode=None, fullgraph=False)
    compiled._compile_all_devices = True
    got = model.generate(**inputs, **options, cache_implementation="static", compile_config=compiled)
    torch._dynamo.reset()
    assert torch.equal(got, want)


def half(model: Any) -> None:
    packed(model)[0].half()


def eager(model: Any) -> None:
    model.set_experts_implementation("eager")


def lacking(model: Any) -> None:
    del packed(model)[0].down_proj_bias


def unnamed(model: Any) -> None:
    model.config._experts_implementation = None


def shorter(model: Any) -> None:
    experts = packed(model)[0]
    experts.down_proj_bias.data = experts.down_proj_bias.data[:, :-1].contiguous()


def parametrised(model: Any) -> None:
    nn.utils.parametrize.register_parametrization(packed(model)[0], "down_proj_bias", nn.Identity())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (half, "serve Mxfp4Experts: its biases have another dtype; got .*float16.*load the model again: .*dtype="),
        (lacking, "serve Mxfp4Experts: it lacks tensors; got .*down_proj_bias.*load the model again"),
        (unnamed, "got None; .*experts_implementation='eager'"),
        (shorter, r"down_bias has the wrong shape; got \(8, 63\)"),
        (eager, "packed MXFP4 experts.*got 'eager'.*experts_implementation='eager'"),
        (parametrised, "parametrised.*to fix it: load the model again .*experts_implementation='eager'"),
    ],
)
def test_refused_at_a_call(change: Callable[[Any], None], words: str, checkpoint: Path) -> None:
    model = load(checkpoint)
    change(model)
    with pytest.raises(ContractError, match=words):
        logits(model, batch(lengths=(3,)))


def spoilt(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Path], dict[str, Tensor]]:
    whole = PREFIX.format(layer=1) + name
    return lambda folder: {whole: change(load_file(folder / "model.safetensors")[whole].clone())}


def nan(scales: Tensor) -> Tensor:
    scales[3, 5, 1] = 0xFF
    return scales


NAN = r"layers\.1\.mlp\.experts\.\S*gate_up\S*_scales has .* NaN; got 0xFF for expert 3, row 5, group 1"


def test_refused_when_transformers_loads(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=NAN):
        load(save(tmp_path / "nan", change=spoilt("gate_up_proj_scales", nan)(checkpoint)))
    with pytest.raises(ContractError, match=r"clamped SwiGLU is another; got alpha 1.702, limit 6.0; .*Mxfp4Config"):
        load(save(tmp_path / "limit", swiglu_limit=6.0))
    with pytest.raises(
        ContractError, match="intermediate_size does not fit MXFP4 experts; got 80; expected a multiple.*Mxfp4Config"
    ):
        load(save(tmp_path / "sizes", intermediate_size=80))


@pytest.mark.parametrize("names", [["down_proj_bias"], ["gate_up_proj_blocks", "gate_up_proj_scales"]])
def test_a_checkpoint_that_lacks_tensors_is_refused(names: list[str], checkpoint: Path, tmp_path: Path) -> None:
    """transformers warns, and leaves their memory as it was."""
    lacks, tensors = [PREFIX.format(layer=1) + name for name in names], load_file(checkpoint / "model.safetensors")
    save_file({name: x for name, x in tensors.items() if name not in lacks}, save(tmp_path) / "model.safetensors")
    with pytest.raises(ContractError, match=f"lacks tensors of its packed.*got no {', '.join(lacks)};.*download"):
        load(tmp_path)


def test_a_backward_pass_names_what_trains(checkpoint: Path) -> None:
    """No experts implementation takes packed experts; the named way to load them does train."""
    inputs = batch(lengths=(3,))
    with pytest.raises(GradientsRefused, match=r"load it again .*\"eager\" and Mxfp4Config\(dequantize=True\)"):
        load(checkpoint)(**inputs).logits.sum().backward()
    model = dequantised(checkpoint)
    model(**inputs).logits.sum().backward()
    assert next(iter(experts_of(model).values())).gate_up_proj.grad is not None


# the loader


def test_a_layer_is_loaded(checkpoint: Path) -> None:
    tensors, experts = load_file(checkpoint / "model.safetensors"), load_experts(checkpoint, 1)
    assert experts.sizes == [E, H, I] and experts.biased
    assert (experts.format, experts.activation, experts.gate_up_order) == ("mxfp4", "clamped_swiglu", "interleaved")
    prefix = PREFIX.format(layer=1)
    gate_up = mxfp4.dequantise(
        tensors[prefix + "gate_up_proj_blocks"].flatten(2), tensors[prefix + "gate_up_proj_scales"]
    )
    assert torch.equal(experts.dequantize(3)[0], torch.cat([gate_up[3, 0::2], gate_up[3, 1::2]]))
    module = packed(load(checkpoint))[1]
    x, ids, weights = torch.randn(5, H), torch.randint(0, E, (5, 2)), torch.rand(5, 2)
    with torch.no_grad():
        assert torch.equal(moe(x, Routing.from_topk(ids, weights, E), experts), module(x, ids, weights))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gate_up_proj_scales", nan, NAN),
        ("down_proj_scales", lambda t: t[:, :-1], r"1\.mlp\.experts\.down_blocks and down_scales do not fit together"),
        ("down_proj_blocks", lambda t: t[..., :15], "down_blocks and down_scales do not fit|three dimensions"),
        ("gate_up_proj_bias", lambda t: t[:, :-2], r"gate_up_bias has the wrong shape; got \(8, 190\)"),
        ("down_proj_bias", lambda t: t.half(), "down_bias has the wrong dtype"),
        ("down_proj_blocks", lambda t: t.view(torch.int8), "down_blocks has the wrong dtype"),
    ],
)
def test_refused_by_the_loader(name: str, change: Any, words: str, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=words):
        load_experts(save(tmp_path, change=spoilt(name, change)(checkpoint)), 1)
    assert isinstance(load_experts(tmp_path, 0), Experts)


def test_a_checkpoint_without_them(checkpoint: Path, tmp_path: Path) -> None:
    for folder, layer in ((checkpoint, 7), (tmp_path, 0)):
        with pytest.raises(CheckpointError, match=f"experts of layer {layer} cannot be read from"):
            load_experts(folder, layer)
    with pytest.raises(
        CheckpointError, match="nowhere is no checkpoint; got no such folder; expected the folder of a gpt"
    ):
        load_experts(tmp_path / "nowhere", 0)
    with pytest.raises(CheckpointError, match="is no checkpoint; got a file"):
        load_experts(checkpoint / "config.json", 0)
    with pytest.raises(ContractError, match="clamped SwiGLU is another"):
        load_experts(save(tmp_path, swiglu_alpha=1.0), 0)


@pytest.mark.parametrize("folder", [None, 3, b"x", "x" * 5000])
def test_what_is_no_folder(folder: Any) -> None:
    with pytest.raises(CheckpointError, match="is no checkpoint; got .*; expected the folder of a gpt-oss"):
        load_experts(folder, 0)


def test_what_are_no_tensors() -> None:
    for given in ((None,), ({}, None)):
        with pytest.raises(ContractError, match="no tensors under a prefix; got .*None"):
            experts_from(*given)  # type: ignore[arg-type]


def test_a_single_file_is_read_before_an_index(checkpoint: Path, tmp_path: Path) -> None:
    """As transformers chooses; and a CPU has a number for torch alone."""
    save(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    got, want = load_experts(tmp_path, 1, "cpu:0"), load_experts(checkpoint, 1)
    assert all(torch.equal(got.tensors[name], tensor) for name, tensor in want.tensors.items())


@pytest.mark.parametrize("device", ["cuda:99", "nowhere", None, "meta"])
def test_a_device_that_is_not_here_is_named_before_any_file(device: Any, tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=f"device.*; got .?{device}") as error:
        load_experts(tmp_path / "nowhere", 0, device=device)
    assert "safetensors" not in str(error.value)
