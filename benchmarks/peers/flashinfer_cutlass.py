"""FlashInfer's CUTLASS experts, `cutlass_fused_moe`, tuned by its own autotuner in the first call.

It wants the up rows before the gate rows: one copy of gate_up a weight set. Written from FlashInfer's public
documentation; it runs only where flashinfer can be imported, on CUDA.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ttnn_moe.bench.implementations import Forward, Implementation, why_not_on_cuda
from ttnn_moe.bench.layer import Layer, Weights


class FlashInfer(Implementation):
    """See the module's docstring."""

    name = "flashinfer cutlass_fused_moe"

    def available(self, device: str) -> str | None:
        return why_not_on_cuda(device, "flashinfer", "flashinfer")

    def prepare(self, layer: Layer, weights: Weights, T: int) -> Forward:
        from flashinfer.autotuner import autotune
        from flashinfer.fused_moe import cutlass_fused_moe

        up_gate = weights.once("up_gate", lambda: torch.cat(weights.gate_up.chunk(2, dim=1)[::-1], dim=1))
        tuned = False

        def call(hidden: Tensor, ids: Tensor, scale: Tensor) -> Tensor:
            nonlocal tuned
            if not tuned:
                tuned = True
                with autotune(True):
                    call(hidden, ids, scale)
            out = torch.empty_like(hidden)
            cutlass_fused_moe(hidden, ids, scale, up_gate, weights.down, hidden.dtype, quant_scales=None, output=out)
            return out

        return call
