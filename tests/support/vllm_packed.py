"""Layers of vLLM whose experts are packed: random experts in a format, and a layer with a checkpoint's tensors."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from paths import ROOT
from ttnn_moe.contract import Experts
from ttnn_moe.formats import quantise_int4_24, quantise_mxfp4
from vllm_layers import E, H, I


def config(name: str) -> Any:
    """The quantisation config that vLLM makes of a checkpoint's config.json."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    given = json.loads((ROOT / "models/qwen3/tiny_int4_24/config.json").read_text())["quantization_config"]
    return get_quantization_config(given["quant_method"]).from_config({**given, "format": name})


def packed(name: str, I: int = I, seed: int = 1) -> tuple[Experts, dict[str, Tensor]]:
    """Random experts in a format, and the tensors as a checkpoint names them."""
    generator = torch.Generator().manual_seed(seed)
    weights = (torch.randn(shape, generator=generator) * 0.1 for shape in ((E, 2 * I, H), (E, H, I)))
    dense = Experts.dense(*(weight.bfloat16() for weight in weights))
    if name == "int4_24":
        experts = quantise_int4_24.quantise_experts(dense, None, None)
        return experts, dict(experts.tensors)
    experts = quantise_mxfp4.quantise_experts(dense)
    names = {key: key.replace("_blocks", "_proj_blocks").replace("_scales", "_proj_scales") for key in experts.tensors}
    return experts, {names[key]: tensor for key, tensor in experts.tensors.items()}


def filled(make: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A layer with a checkpoint's tensors, not yet processed."""
    layer = make(loaded=False, quant_config=config(name))
    assert set(dict(layer.named_parameters())) == set(tensors)
    for key, parameter in layer.named_parameters():
        parameter.weight_loader(parameter, tensors[key])
    return layer
