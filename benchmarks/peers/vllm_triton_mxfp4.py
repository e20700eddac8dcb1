"""vLLM's choice for gpt-oss on Hopper: its copy of triton_kernels, `matmul_ogs`, in vLLM's layouts of weights.

Ids and weights are given, so routing data is made as vLLM's modular experts make it. vLLM makes it of the router's
scores where it can, in fewer kernels. It runs only where vllm can be imported, on CUDA. The copies are made once a
weight set.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ttnn_moe.activations import SILU
from ttnn_moe.bench.implementations import Forward, Implementation, why_not_on_cuda
from ttnn_moe.bench.layer import Layer, Weights


class VllmTritonMxfp4(Implementation):
    """See the module's docstring."""

    name = "vllm triton mxfp4"

    def available(self, device: str) -> str | None:
        return why_not_on_cuda(device, "vllm", "vllm")

    def why_not(self, layer: Layer, T: int) -> str | None:
        return "its activation is gpt-oss's" if layer.activation == SILU else None

    def prepare(self, layer: Layer, weights: Weights, T: int) -> Forward:
        from vllm.model_executor.layers.fused_moe.config import mxfp4_w4a16_moe_quant_config
        from vllm.model_executor.layers.fused_moe.experts import gpt_oss_triton_kernels_moe as moe

        (first, one), (second, two) = weights.once(
            "vllm triton", lambda: [_laid_out(weights, name) for name in ("gate_up", "down")]
        )
        biases = [weights.experts.tensors[f"{name}_bias"].float() for name in ("gate_up", "down")]
        config = mxfp4_w4a16_moe_quant_config(one, two, *biases)

        def call(hidden: Tensor, ids: Tensor, scale: Tensor) -> Tensor:
            routing = moe.make_routing_data(ids, scale, layer.E)
            out = hidden.new_empty(hidden.shape)
            return moe.triton_kernel_fused_experts(
                out, hidden, first, second, *routing, topk=layer.K, quant_config=config
            )

        return call


def _laid_out(weights: Weights, name: str) -> tuple[Any, Any]:
    """A weight, and its precision config."""
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig
    from vllm.model_executor.layers.quantization.utils.mxfp4_utils import _swizzle_mxfp4

    weight, flex, scale = _swizzle_mxfp4(*(weights.experts.tensors[f"{name}_{part}"] for part in ("blocks", "scales")))
    return weight, PrecisionConfig(weight_scale=scale, flex_ctx=FlexCtx(rhs_data=flex))
