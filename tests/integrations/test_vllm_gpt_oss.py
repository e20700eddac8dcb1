"""gpt-oss's experts in vLLM, on the reference backend. Without vLLM: in a stand-in of its classes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import ttnn_moe
import vllm_layers
import vllm_stand_in
import vllm_whole
from benchmark_scripts import script
from ttnn_moe import arranging
from ttnn_moe.activations import CLAMPED_SWIGLU
from ttnn_moe.contract import Experts
from ttnn_moe.errors import ContractError
from ttnn_moe.formats import mxfp4_boxes, quantise_mxfp4
from ttnn_moe.integrations.vllm.surface import GPT_OSS
from vllm_layers import E, H, K, applied, call, served, warnings

I = 96  # vLLM's kernels want a multiple of 64
MXFP4 = f"{vllm_stand_in.QUANTIZATION}.mxfp4"
NAMES = {"blocks": "weight", "scales": "weight_scale", "bias": "bias"}


@pytest.fixture(scope="module")
def make() -> Iterator[Any]:
    with vllm_layers.with_plugin() as made:
        vllm_layers.needs(GPT_OSS)
        yield made


class Monolithic:
    """A choice of vLLM's that takes scores of the router."""

    @staticmethod
    def is_monolithic() -> bool:
        return True


@pytest.fixture(autouse=True)
def as_on_a_gpu(on_the_cpu: None, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has kernels for the layer; a CPU may lack what they want."""
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4 as oracle

    triton = oracle.Mxfp4MoeBackend.TRITON, Monolithic
    monkeypatch.setattr(f"{MXFP4}.select_mxfp4_moe_backend", lambda moe: triton)


@pytest.fixture
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arranging, "gains", lambda experts: experts.format == "mxfp4")


def drawn(seed: int = 1) -> tuple[Experts, dict[str, Tensor]]:
    """Random experts, and their tensors under vLLM's names."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {}
    for name, rows, channels in (("gate_up", 2 * I, H), ("down", H, I)):
        blocks, scales = quantise_mxfp4.quantise(random(E, rows, channels) * channels**-0.5)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": random(E, rows).bfloat16()}
    experts = Experts.mxfp4(**tensors, gate_up_order="interleaved", activation=CLAMPED_SWIGLU)
    theirs = {"gate_up": "w13", "down": "w2"}
    return experts, {
        f"{theirs[name.rpartition('_')[0]]}_{NAMES[name.rpartition('_')[2]]}": tensor
        for name, tensor in tensors.items()
    }


def built(make: Any, **options: Any) -> Any:
    """A layer of gpt-oss without weights."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    config = get_quantization_config("gpt_oss_mxfp4").from_config({"quant_method": "mxfp4"})
    options = {"activation": "swigluoai", "has_bias": True, "intermediate_size": I, **options}
    return make(loaded=False, quant_config=config, **options)


def load(layer: Any, tensors: dict[str, Tensor]) -> None:
    for name, parameter in dict(layer.named_parameters()).items():
        parameter.weight_loader(parameter, tensors[name], weight_name=name, shard_id=None, expert_id=None)


def filled(make: Any, tensors: dict[str, Tensor], **options: Any) -> Any:
    layer = built(make, **options)
    load(layer, tensors)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that nobody wrote is not zero: bytes are 255."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def computes(layer: Any, experts: Experts) -> None:
    """The layer has these experts' numbers; its own have rows and channels of zeros behind them."""
    x, weights, ids = call(9)
    expected = ttnn_moe.moe(x, ttnn_moe.Routing.from_topk(ids, weights, E), experts, backend="reference")
    torch.testing.assert_close(applied(layer, x, weights, ids), expected, rtol=1e-2, atol=1e-2)


def configs() -> dict[str, type]:
    """vLLM's register of configurations that plug-ins gave it."""
    return import_module(vllm_stand_in.QUANTIZATION)._CUSTOMIZED_METHOD_TO_QUANT_CONFIG  # type: ignore[no-any-return]


def test_the_configuration_is_the_plug_ins_and_registered_once(make: Any, lines: list[Any]) -> None:
    from ttnn_moe.integrations.vllm import register

    before = configs()["gpt_oss_mxfp4"]
    assert before.__module__ == "ttnn_moe.integrations.vllm.gpt_oss"
    register()
    assert configs()["gpt_oss_mxfp4"] is before and warnings(lines) == []


def test_another_plug_in_keeps_the_configuration(make: Any, lines: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from ttnn_moe.integrations.vllm import register

    class Other:
        pass

    monkeypatch.setitem(configs(), "gpt_oss_mxfp4", Other)
    register()
    assert configs()["gpt_oss_mxfp4"] is Other
    assert "another plug-in has taken vLLM's gpt_oss_mxfp4" in lines[0][1]


def test_a_layer_has_the_references_numbers(make: Any, lines: list[Any]) -> None:
    experts, tensors = drawn()
    layer = filled(make, tensors)
    assert served(layer) and not layer.quant_method.is_monolithic
    assert layer.quant_method.get_fused_moe_quant_config(layer) is None
    computes(layer, experts)
    assert warnings(lines) == [] and "clamped_swiglu" in lines[-1][1]


@pytest.mark.usefixtures("as_on_hopper")
def test_a_loaded_layer_is_arranged(make: Any) -> None:
    experts, tensors = drawn()
    layer = filled(make, tensors)
    computes(layer, experts)
    state = layer.state_dict()
    for name, tensor in tensors.items():
        held = state[name][tuple(map(slice, tensor.shape))]
        assert torch.equal(held, tensor), f"{name} in a state dict is the checkpoint's"
    assert not torch.equal(layer.w13_weight.data, state["w13_weight"])
    layer.quant_method.process_weights_after_loading(layer)
    computes(layer, experts)


@pytest.mark.usefixtures("as_on_hopper")
def test_a_weight_loader_fills_an_arranged_layer(make: Any) -> None:
    """Each tensor by itself, in place: a captured graph reads the new bytes at the old addresses."""
    layer = filled(make, drawn()[1])
    at = [parameter.data_ptr() for parameter in layer.parameters()]
    experts, tensors = drawn(seed=2)
    load(layer, tensors)
    assert [parameter.data_ptr() for parameter in layer.parameters()] == at
    computes(layer, experts)


@pytest.mark.parametrize("arranges", [False, True])
def test_vllm_reloads_a_layer(make: Any, monkeypatch: pytest.MonkeyPatch, arranges: bool) -> None:
    """By vLLM's own functions: other tensors are filled and processed, then copied over the parameters."""
    reload = pytest.importorskip("vllm.model_executor.model_loader.reload")
    monkeypatch.setattr(arranging, "gains", lambda experts: arranges)
    layer = built(make)
    with torch.device("cpu"):
        reload.record_metadata_for_reloading(layer)
    for seed in (1, 2, 3):
        experts, tensors = drawn(seed)
        parameters = dict(layer.named_parameters())
        if seed > 1:
            with poisoned():
                reload.initialize_layerwise_reload(layer)
                load(layer, tensors)
                reload.finalize_layerwise_reload(layer, None)
        else:
            load(layer, tensors)
            layer.quant_method.process_weights_after_loading(layer)
        now = dict(layer.named_parameters())
        assert all(now[key] is parameters[key] for key in tensors), "graphs keep addresses"
        computes(layer, experts)


@pytest.mark.skipif(not vllm_layers.REAL, reason="vLLM is not here")
@pytest.mark.parametrize("arranges", [False, True])
def test_vllms_loader_reads_a_checkpoint(
    make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arranges: bool
) -> None:
    """vLLM's own model, without attention."""
    from vllm.model_executor.models import gpt_oss

    monkeypatch.setattr(gpt_oss, "OAIAttention", lambda *_, **__: torch.nn.Identity())
    monkeypatch.setattr(arranging, "gains", lambda experts: arranges and experts.format == "mxfp4")
    sizes = {"num_hidden_layers": 2, "num_local_experts": E, "hidden_size": H, "intermediate_size": I, "head_dim": 16}
    config = {
        **script("vllm_models").CONFIGS["gpt-oss-20b"],
        **sizes,
        "num_experts_per_tok": K,
        "num_attention_heads": 8,
        "vocab_size": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    config = vllm_whole.config_of(tmp_path, dtype="bfloat16")
    layers = [drawn(seed) for seed in (3, 4)]
    with vllm_whole.ready(config), torch.device("cpu"):
        model = gpt_oss.GptOssForCausalLM(vllm_config=config)
        model.load_weights((name, tensor) for n, (_, held) in enumerate(layers) for name, tensor in stored(n, held))
        for layer, (experts, _) in zip(model.model.layers, layers, strict=True):
            loaded = vllm_whole.held(layer.mlp.experts)
            loaded.quant_method.process_weights_after_loading(loaded)
            assert served(loaded)
            computes(loaded, experts)


@pytest.mark.skipif(not vllm_layers.REAL, reason="vLLM is not here")
def test_a_layer_runs_in_vllms_runner(make: Any) -> None:
    """The router gives its choices, not its scores."""
    from vllm.forward_context import get_forward_context, set_forward_context

    experts, tensors = drawn()
    layer = filled(make, tensors)
    x, logits = torch.randn(6, H).bfloat16(), torch.randn(6, E)
    with set_forward_context(None, make.config):
        get_forward_context().all_moe_layers = None  # layers by their names: those of other tests are there too
        found = layer.whole(x.clone(), logits)
    weights, ids = vllm_layers.route(x, logits, K, True)
    wanted = ttnn_moe.moe(x, ttnn_moe.Routing.from_topk(ids, weights, E), experts, backend="reference")
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)


def stored(layer: int, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """A layer's tensors as a checkpoint has them."""
    theirs = {ours: name for name, ours in NAMES.items()}
    for name, tensor in tensors.items():
        matrix, _, part = name.partition("_")
        if part == "weight":
            tensor = tensor.unflatten(-1, (-1, 16))
        matrix = {"w13": "gate_up_proj", "w2": "down_proj"}[matrix]
        yield f"model.layers.{layer}.mlp.experts.{matrix}_{theirs[part]}", tensor


@pytest.mark.usefixtures("as_on_hopper")
@pytest.mark.parametrize("at", [1, 2])
def test_without_memory_to_arrange_a_layer_stays_with_vllm(
    make: Any, lines: list[Any], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Of two tensors that are arranged before, the bytes come back."""
    exchange, calls = mxfp4_boxes._exchange, []

    def fails(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.")
        return exchange(*args)

    monkeypatch.setattr(mxfp4_boxes, "_exchange", fails)
    layer, tensors, got = built(make), drawn()[1], {}
    monkeypatch.setattr(
        f"{MXFP4}.GptOssMxfp4MoEMethod.process_weights_after_loading",
        lambda self, layer: got.update({name: held.data.clone() for name, held in layer.named_parameters()}),
    )
    load(layer, tensors)
    layer.quant_method.process_weights_after_loading(layer)
    assert not served(layer) and layer.quant_method.is_monolithic
    assert "no memory to arrange" in warnings(lines)[0]
    for name, tensor in tensors.items():
        assert torch.equal(got[name][tuple(map(slice, tensor.shape))], tensor), name


def test_ranks_hold_their_experts(make: Any) -> None:
    from ttnn_moe.integrations.vllm.gpt_oss import PARAMETERS, experts_of
    from ttnn_moe.integrations.vllm.served import ServedLayer

    experts, tensors = drawn()
    x, weights, ids = call(7)
    total = torch.zeros(7, H)
    for rank in range(2):
        here = torch.arange(4 * rank, 4 * rank + 4)
        expert_map = torch.full((E,), -1, dtype=torch.int32)
        expert_map[here] = torch.arange(4, dtype=torch.int32)
        parts = tuple(tensors[name][here] for name in PARAMETERS.values())
        total += ServedLayer(experts_of, E, ids.shape[1], 64, torch.bfloat16)(
            x, weights, ids, parts, expert_map
        ).float()
    expected = ttnn_moe.moe(x, ttnn_moe.Routing.from_topk(ids, weights, E), experts, backend="reference").float()
    assert float((total - expected).norm() / expected.norm()) < 1e-2, "one rounding to bf16 a rank"


REFUSED = {
    "backend": ({"moe_backend": "marlin"}, "moe_backend='marlin' was asked for"),
    "lora": ({"is_lora_enabled": True}, "LoRA"),
    "no biases": ({"has_bias": False}, "without biases"),
    "silu": ({"activation": SimpleNamespace(value="silu", is_gated=True)}, "its activation is"),
    "dtype": ({"in_dtype": torch.float16}, "torch.float16"),
    "ranks": ({"dp_size": 2}, "--data-parallel-size 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_layer_that_cannot_be_served_stays_with_vllm(make: Any, lines: list[Any], name: str) -> None:
    from ttnn_moe.integrations.vllm.gpt_oss import GptOssMethod

    fields, said = REFUSED[name]
    moe = vllm_layers._changed(built(make).moe_config, fields)
    lines.clear()
    for _ in range(2):
        with make.current():
            method = GptOssMethod(moe)
        assert method.is_monolithic, "as vLLM chose"
    refusals = warnings(lines)
    assert len(refusals) == 1 and said in refusals[0], "one line for all layers"


@pytest.mark.parametrize("name", ["VLLM_MXFP4_USE_MARLIN", "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16"])
def test_kernels_that_were_asked_for_stay(make: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from ttnn_moe.integrations.vllm import gate

    moe = built(make).moe_config
    assert gate.why_not_gpt_oss(moe, None, None) is None
    monkeypatch.setenv(name, "0")
    assert gate.why_not_gpt_oss(moe, None, None) is None
    monkeypatch.setenv(name, "1")
    assert name in str(gate.why_not_gpt_oss(moe, None, None))
    monkeypatch.delenv(name)
    asked = SimpleNamespace(quantization_config=SimpleNamespace(moe=SimpleNamespace(activation="mxfp8")))
    assert "format of activations" in str(gate.why_not_gpt_oss(moe, asked, None))


def test_gpus_of_which_nothing_is_known_stay_with_vllm(
    make: Any, lines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TTNN_MOE_BACKEND")
    layer = built(make)
    assert layer.quant_method.is_monolithic
    assert "compute capability 9.0" in warnings(lines)[0] and "TTNN_MOE_BACKEND=cuda" in warnings(lines)[0]


def test_sizes_that_mxfp4_does_not_have_stay_with_vllm(make: Any, lines: list[Any]) -> None:
    layer = built(make, hidden_size=72)
    assert layer.quant_method.is_monolithic
    assert "H" in warnings(lines)[0] and "32" in warnings(lines)[0]


def _no_memory(*args: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 708.00 MiB.\nmore")


def _no_kernel(*args: Any) -> None:
    raise ContractError("no kernels run this problem", got="H=100")


@pytest.mark.usefixtures("as_on_hopper")
@pytest.mark.parametrize(
    ("fails", "said"),
    [(_no_memory, "no memory for the operator's scratch"), (_no_kernel, "no kernels run"), (None, "")],
)
def test_what_fails_at_load_stays_with_vllm(
    make: Any, lines: list[Any], monkeypatch: pytest.MonkeyPatch, fails: Any, said: str
) -> None:
    """vLLM's own preparation gets the checkpoint's bytes."""
    from ttnn_moe.integrations.vllm.served import ServedLayer

    got = {}

    def process(self: Any, layer: Any) -> None:
        got.update({name: parameter.data.clone() for name, parameter in layer.named_parameters()})

    monkeypatch.setattr(f"{MXFP4}.GptOssMxfp4MoEMethod.process_weights_after_loading", process)
    tensors = dict(drawn()[1])
    if fails is None:
        tensors["w2_weight_scale"] = tensors["w2_weight_scale"].clone()
        tensors["w2_weight_scale"][3, 7, 1] = 255
        said = "w2_weight_scale has a scale that is NaN; got 0xFF for expert 3, row 7"
    else:
        monkeypatch.setattr(ServedLayer, "prepare", fails)
    layer = filled(make, tensors)
    assert not served(layer) and layer.quant_method.is_monolithic
    assert said in warnings(lines)[0]
    for name, tensor in tensors.items():
        assert torch.equal(got[name][tuple(map(slice, tensor.shape))], tensor), name
