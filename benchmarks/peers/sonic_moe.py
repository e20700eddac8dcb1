"""SonicMoE's CuTe-DSL experts from a routing that is given, `moe_general_routing_inputs`.

It wants gate and up rows interleaved: one copy of gate_up a weight set. Written from SonicMoE's public sources and
their comments; it runs only where sonicmoe can be imported, on CUDA.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ttnn_moe.bench.implementations import Forward, Implementation, why_not_on_cuda
from ttnn_moe.bench.layer import Layer, Weights


class SonicMoe(Implementation):
    """See the module's docstring."""

    name = "sonic-moe"

    def available(self, device: str) -> str | None:
        return why_not_on_cuda(device, "sonicmoe", "sonic-moe")

    def prepare(self, layer: Layer, weights: Weights, T: int) -> Forward:
        from sonicmoe.enums import ActivationType
        from sonicmoe.functional import moe_general_routing_inputs

        E, I, H = layer.E, layer.I, layer.H
        gate_up = weights.once(
            "interleaved", lambda: weights.gate_up.view(E, 2, I, H).transpose(1, 2).reshape(E, 2 * I, H)
        )
        gate_up, down = gate_up.permute(1, 2, 0), weights.down.permute(1, 2, 0)
        tokens = torch.arange(T, dtype=torch.int32, device=gate_up.device).repeat_interleave(layer.K)
        silu_mul = ActivationType.SWIGLU

        def call(hidden: Tensor, ids: Tensor, scale: Tensor) -> Tensor:
            stream = torch.cuda.current_stream().cuda_stream
            return moe_general_routing_inputs(
                hidden, scale.flatten(), tokens, ids.flatten(), gate_up, None, down, None, E, stream, silu_mul, True
            )[0]

        return call
