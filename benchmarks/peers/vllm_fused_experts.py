"""vLLM's Triton experts, `fused_experts`, with the configuration it finds for the device.

Written from vLLM's public API reference; it runs only where vllm can be imported, on CUDA.
"""

from __future__ import annotations

import contextlib

from torch import Tensor

from ttnn_moe.bench.implementations import Forward, Implementation, why_not_on_cuda
from ttnn_moe.bench.layer import Layer, Weights

_entered = contextlib.ExitStack()


class Vllm(Implementation):
    """See the module's docstring."""

    name = "vllm fused_experts"

    def available(self, device: str) -> str | None:
        return why_not_on_cuda(device, "vllm", "vllm")

    def prepare(self, layer: Layer, weights: Weights, T: int) -> Forward:
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.model_executor.layers.fused_moe import fused_experts

        # some versions look their configuration up in every call; entered once, for the rest of the process
        if not getattr(_entered, "there", False):
            _entered.enter_context(set_current_vllm_config(VllmConfig()))
            _entered.there = True  # type: ignore[attr-defined]

        def call(hidden: Tensor, ids: Tensor, scale: Tensor) -> Tensor:
            return fused_experts(hidden, weights.gate_up, weights.down, topk_weights=scale, topk_ids=ids)

        return call
