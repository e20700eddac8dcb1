"""MXFP4 experts in vLLM whose bytes have the order of the GPU's kernels: at load, after reloads, in a state dict."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import ttnn_moe
import vllm_layers
from interrupts import each_interrupt
from ttnn_moe import arranging
from ttnn_moe.contract import Experts
from ttnn_moe.errors import ContractError
from ttnn_moe.formats import in_place, int4_24, mxfp4_boxes
from ttnn_moe.integrations.vllm import arranged
from ttnn_moe.integrations.vllm.surface import QUANTISED
from vllm_layers import E, applied, call
from vllm_packed import config, filled, packed


@pytest.fixture(scope="module")
def make() -> Iterator[Any]:
    with vllm_layers.with_plugin() as made:
        vllm_layers.needs(QUANTISED)
        yield made


@pytest.fixture(autouse=True)
def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTNN_MOE_BACKEND", "reference")
    monkeypatch.setattr(arranging, "gains", lambda experts: experts.format == "mxfp4")


@pytest.fixture
def layer(make: Any) -> Any:
    made = filled(make, "mxfp4", packed("mxfp4")[1])
    made.quant_method.process_weights_after_loading(made)
    return made


def computes(layer: Any, experts: Experts) -> None:
    """The layer has these experts' numbers."""
    x, weights, ids = call(9)
    expected = ttnn_moe.moe(x, ttnn_moe.Routing.from_topk(ids, weights, E), experts, backend="reference")
    torch.testing.assert_close(applied(layer, x, weights, ids), expected, rtol=0, atol=0)


def is_arranged(layer: Any, tensors: dict[str, Tensor]) -> None:
    """Parameters hold the arranged bytes of these."""
    names = {name: name.replace("_proj_", "_") for name in tensors}
    wanted = arranging.arranged(Experts.mxfp4(**{names[name]: tensor for name, tensor in tensors.items()}))
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.data, wanted.tensors[names[name]]), name


def test_a_loaded_layer_is_arranged_once(layer: Any) -> None:
    experts, tensors = packed("mxfp4")
    for _ in range(2):
        is_arranged(layer, tensors)
        computes(layer, experts)
        layer.quant_method.process_weights_after_loading(layer)


def test_a_parameter_knows_its_bytes_wherever_an_interrupt_comes(make: Any) -> None:
    """One tensor is arranged at a time, and a layer that is processed again goes on with the others."""
    experts, tensors = packed("mxfp4")
    layer = filled(make, "mxfp4", tensors)

    def work() -> None:
        for name, parameter in layer.named_parameters():
            parameter.data.copy_(tensors[name])
            setattr(parameter, arranged._MARK, None)
        layer.quant_method.process_weights_after_loading(layer)

    def check() -> None:
        state = layer.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())

    assert each_interrupt(work, check, in_place, mxfp4_boxes, arranged) > 100
    is_arranged(layer, tensors)
    computes(layer, experts)


def test_a_state_dict_has_the_checkpoints_bytes(layer: Any) -> None:
    experts, tensors = packed("mxfp4")
    state = layer.state_dict()
    for name, tensor in tensors.items():
        assert torch.equal(state[name], tensor), name
    computes(layer, experts)


def test_a_weight_loader_fills_an_arranged_layer(layer: Any) -> None:
    """Each tensor by itself, in place: a captured graph reads the new bytes at the old addresses."""
    experts, tensors = packed("mxfp4", seed=2)
    at = [parameter.data_ptr() for parameter in layer.parameters()]
    for name, parameter in layer.named_parameters():
        parameter.weight_loader(parameter, tensors[name])
    assert [parameter.data_ptr() for parameter in layer.parameters()] == at
    is_arranged(layer, tensors)
    computes(layer, experts)
    broken = tensors["down_proj_scales"].clone()
    broken.view(-1)[7] = 255
    with pytest.raises(ContractError, match="down_proj_scales"):
        layer.down_proj_scales.weight_loader(layer.down_proj_scales, broken)
    computes(layer, experts)


@pytest.mark.parametrize("name", ["mxfp4", "int4_24"])
def test_vllm_reloads_a_layer(make: Any, name: str) -> None:
    """By vLLM's own functions: other tensors are filled and processed, then copied over the parameters."""
    reload = pytest.importorskip("vllm.model_executor.model_loader.reload")
    layer = make(loaded=False, quant_config=config(name))
    with torch.device("cpu"):
        reload.record_metadata_for_reloading(layer)
    for seed in (1, 2, 3):
        experts, tensors = packed(name, seed=seed)
        parameters = dict(layer.named_parameters())
        if seed > 1:
            reload.initialize_layerwise_reload(layer)
        for key, parameter in dict(layer.named_parameters()).items():
            parameter.weight_loader(parameter, tensors[key])
        if seed > 1:
            reload.finalize_layerwise_reload(layer, None)
        else:
            layer.quant_method.process_weights_after_loading(layer)
        now = dict(layer.named_parameters())
        assert all(now[key] is parameters[key] for key in tensors), "graphs keep addresses"
        if name == "mxfp4":
            is_arranged(layer, tensors)
        computes(layer, experts)


@pytest.mark.skipif(not vllm_layers.REAL, reason="vLLM is not here")
@pytest.mark.parametrize("name", ["mxfp4", "int4_24", "gpt_oss"])
def test_a_layer_is_freed(make: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """vLLM keeps weight loaders of every layer for reloads, and forgets a layer whose loaders are bound to it."""
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    if name == "gpt_oss":
        mxfp4 = "vllm.model_executor.layers.quantization.mxfp4"
        monkeypatch.setattr(f"{mxfp4}.select_mxfp4_moe_backend", lambda moe: (None, None))  # a CPU may have none
        given = get_quantization_config("gpt_oss_mxfp4").from_config({"quant_method": "mxfp4"})
        layer = make(loaded=False, quant_config=given, activation="swigluoai", has_bias=True)
    else:
        layer = make(loaded=False, quant_config=config(name))
    with torch.device("cpu"):
        record_metadata_for_reloading(layer.whole)
    context = make.config.compilation_config.static_forward_context
    for key in [key for key, held in context.items() if held is layer.whole or held is layer]:
        del context[key]
    seen = weakref.ref(layer)
    del layer
    gc.collect()
    assert seen() is None


def test_reloaded_scales_that_fp16_does_not_hold_are_refused(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured graphs have kernels that read the scales as fp16."""
    layer = filled(make, "int4_24", packed("int4_24")[1])
    monkeypatch.setattr(int4_24, "fit_fp16", lambda *_: True)
    layer.quant_method.process_weights_after_loading(layer)
    monkeypatch.setattr(int4_24, "fit_fp16", lambda *_: False)
    with pytest.raises(ContractError, match="fp16 does not hold"):
        layer.quant_method.process_weights_after_loading(layer)
