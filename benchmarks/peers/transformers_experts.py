"""transformers' experts implementations, through its own Qwen3-MoE experts module and the weights as they are.

They are handed what transformers' router gives: int64 ids, weights in the dtype of hidden.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from ttnn_moe.bench.implementations import Forward, Implementation
from ttnn_moe.bench.layer import Layer, Weights, gib

# batched_mm copies the weights of every pair; one copy may take so much
BATCHED_BYTES = 16 * 2**30
# eager waits for the device at every expert: beyond this its time says nothing new, and takes that of others' rounds
EAGER_TOKENS = 32


class Transformers(Implementation):
    """One of its implementations: grouped_mm (its default), batched_mm, eager."""

    ids_dtype = torch.int64
    weights_dtype = None

    def __init__(self, implementation: str):
        self.implementation = implementation
        self.name = f"transformers {implementation}"

    def available(self, device: str) -> str | None:
        if importlib.util.find_spec("transformers") is None:
            return "transformers is not installed"
        return None

    def why_not(self, layer: Layer, T: int) -> str | None:
        copies = T * layer.K * layer.expert_bytes
        if self.implementation == "batched_mm" and copies > BATCHED_BYTES:
            return f"it copies the weights of every pair: {gib(copies)}, more than {gib(BATCHED_BYTES)}"
        if self.implementation == "eager" and T > EAGER_TOKENS:
            return f"it waits for the device at every expert: measured up to T={EAGER_TOKENS}"
        return None

    def prepare(self, layer: Layer, weights: Weights, T: int) -> Forward:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        config = Qwen3MoeConfig(
            num_experts=layer.E, num_experts_per_tok=layer.K, hidden_size=layer.H, moe_intermediate_size=layer.I
        )
        config._experts_implementation = self.implementation
        with torch.device("meta"):
            experts = Qwen3MoeExperts(config)
        experts.gate_up_proj = torch.nn.Parameter(weights.gate_up, requires_grad=False)
        experts.down_proj = torch.nn.Parameter(weights.down, requires_grad=False)

        def call(hidden: Tensor, ids: Tensor, scale: Tensor) -> Tensor:
            return experts(hidden, ids, scale)

        return call
