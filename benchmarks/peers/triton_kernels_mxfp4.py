"""triton_kernels' ragged matrix products of MXFP4 weights, in the layouts that it chooses for the GPU.

gpt-oss's activation is fused into the first product, over gate and up rows that alternate. SiLU*mul is torch's. So is
the sort, as triton_kernels' own starts from router scores. Written from the public sources in triton-lang/triton; it
runs only where triton_kernels.matmul can be imported, on CUDA. The copies of the weights are made once a weight set.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ttnn_moe.activations import ALPHA, LIMIT, SILU
from ttnn_moe.bench.implementations import Forward, Implementation, why_not_on_cuda
from ttnn_moe.bench.layer import Layer, Weights


class TritonKernelsMxfp4(Implementation):
    """See the module's docstring."""

    name = "triton_kernels mxfp4 matmul"

    def available(self, device: str) -> str | None:
        return why_not_on_cuda(device, "triton_kernels.matmul", "triton_kernels (with triton_kernels.matmul)")

    def prepare(self, layer: Layer, weights: Weights, T: int) -> Forward:
        from triton_kernels.matmul import FnSpecs, FusedActivation, matmul
        from triton_kernels.swiglu import swiglu_fn
        from triton_kernels.tensor import make_ragged_tensor_metadata

        E, K, I, H = layer.E, layer.K, layer.I, layer.H
        made = weights.once("triton_kernels", lambda: [_laid_out(weights, name) for name in ("gate_up", "down")])
        (gate_up, first), (down, second) = made
        biases = [weights.experts.tensors.get(f"{name}_bias") for name in ("gate_up", "down")]
        gate_up_bias, down_bias = (None if bias is None else bias.float() for bias in biases)
        bounds = torch.arange(E + 1, dtype=torch.int32, device="cuda")
        fused = FusedActivation(FnSpecs("swiglu", swiglu_fn, ("alpha", "limit"), reduction_n=2), (ALPHA, LIMIT))
        plain = {} if layer.activation == SILU else {"fused_activation": fused}

        def call(hidden: Tensor, ids: Tensor, scale: Tensor) -> Tensor:
            experts, order = ids.flatten().sort()
            ragged = make_ragged_tensor_metadata(torch.searchsorted(experts, bounds).diff().int(), T * K)
            pairs = order.int()
            given = {"a_ragged_metadata": ragged, "gather_indx": pairs // K, "precision_config": first, **plain}
            act = matmul(hidden, gate_up, gate_up_bias, **given)
            if layer.activation == SILU:
                act = torch.nn.functional.silu(act[..., :I]).mul_(act[..., I:])
            given = {"a_ragged_metadata": ragged, "scatter_indx": pairs, "precision_config": second}
            out = matmul(act, down, down_bias, **given, gammas=scale.flatten()[order])
            return out.view(T, K, H).sum(1)

        return call


def _laid_out(weights: Weights, name: str) -> tuple[Any, Any]:
    """A weight [E, K, R] and its precision config."""
    from triton_kernels.matmul import FlexCtx, PrecisionConfig
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details import layout

    blocks, scales = (weights.experts.tensors[f"{name}_{part}"].mT for part in ("blocks", "scales"))
    value = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    scale = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
    weight = convert_layout(wrap_torch_tensor(blocks, dtype=FP4), value)
    return weight, PrecisionConfig(b_mx_scale=convert_layout(wrap_torch_tensor(scales), scale), flex_ctx=FlexCtx())
