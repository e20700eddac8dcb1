"""vLLM's Marlin experts of MXFP4 weights, `fused_marlin_moe`, in the layout and the padding that vLLM gives gpt-oss.

H is padded to a multiple of 256 and I to one of 128, with zeros; hidden is padded in each call, and out is cut. Written
from vLLM's public sources; it runs only where vllm can be imported, on CUDA. The copies are made once a weight set.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ttnn_moe.activations import SILU
from ttnn_moe.bench.implementations import Forward, Implementation, why_not_on_cuda
from ttnn_moe.bench.layer import Layer, Weights
from ttnn_moe.sizes import ceil_div


class VllmMarlinMxfp4(Implementation):
    """See the module's docstring."""

    name = "vllm marlin mxfp4"

    def available(self, device: str) -> str | None:
        return why_not_on_cuda(device, "vllm", "vllm")

    def prepare(self, layer: Layer, weights: Weights, T: int) -> Forward:
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
        from vllm.scalar_type import scalar_types

        held = weights.once("marlin", lambda: _laid_out(layer, weights))
        H = held.hidden_size
        names = ("w13_weight", "w2_weight", "w13_bias", "w2_bias", "w13_weight_scale", "w2_weight_scale")
        given = [getattr(held, name, None) for name in names]
        options = {"quant_type_id": scalar_types.float4_e2m1f.id, "global_num_experts": layer.E}
        activation = MoEActivation("silu" if layer.activation == SILU else "swigluoai")
        options |= {"activation": activation, "workspace": held.workspace}

        def call(hidden: Tensor, ids: Tensor, scale: Tensor) -> Tensor:
            out = fused_marlin_moe(pad(hidden, (0, H - layer.H)), *given, scale, ids, **options)
            return out[:, : layer.H].contiguous()

        return call


def _laid_out(layer: Layer, weights: Weights) -> Any:
    """What vLLM's own preparation makes of the padded tensors."""
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_moe_fp4_layer_for_marlin

    H, I = 256 * ceil_div(layer.H, 256), 128 * ceil_div(layer.I, 128)
    sizes = {"num_experts": layer.E, "hidden_size": H, "intermediate_size_per_partition": I}
    held = nn.Module()
    for name, size in (sizes | {"params_dtype": torch.bfloat16}).items():
        setattr(held, name, size)
    held.moe_config = SimpleNamespace(**sizes, hidden_dim=H)
    tensors = weights.experts.tensors
    more_H, more_I = H - layer.H, I - layer.I
    for name, theirs, rows, channels in (("gate_up", "w13", more_I, more_H), ("down", "w2", more_H, more_I)):
        for part, suffix, group in (("blocks", "weight", 2), ("scales", "weight_scale", 32), ("bias", "bias", 0)):
            tensor = tensors.get(f"{name}_{part}")
            if tensor is None:
                continue
            last = channels // group if group else 0
            if name == "gate_up" and weights.experts.gate_up_order == "halves":
                halves = [_padded(half, rows, last, part == "bias") for half in tensor.chunk(2, 1)]
                tensor = torch.cat(halves, 1)
            else:
                tensor = _padded(tensor, rows * (2 if name == "gate_up" else 1), last, part == "bias")
            held.register_parameter(f"{theirs}_{suffix}", nn.Parameter(tensor, requires_grad=False))
    prepare_moe_fp4_layer_for_marlin(held)
    return held


def _padded(tensor: Tensor, rows: int, last: int, is_bias: bool) -> Tensor:
    return pad(tensor, (0, rows) if is_bias else (0, last, 0, rows)).contiguous()
