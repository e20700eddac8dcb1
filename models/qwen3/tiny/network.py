"""The tiny model's sizes, and transformers' Qwen3-MoE for training: it computes every expert for every token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .tokenizer import END, PAD, SPECIAL, VOCAB_SIZE

_ID = {token: VOCAB_SIZE - len(SPECIAL) + i for i, token in enumerate(SPECIAL)}

# config.json as Qwen's own checkpoints write it. H, I and the dense size are multiples of 128.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "eos_token_id": _ID[END],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.05,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
    "mlp_only_layers": [0, 2, 4],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "pad_token_id": _ID[PAD],
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.01,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCAB_SIZE,
}
GENERATION_CONFIG: dict[str, Any] = {"do_sample": False, "eos_token_id": [_ID[END], _ID[PAD]], "pad_token_id": _ID[PAD]}


class Network(nn.Module):
    """Qwen3MoeForCausalLM in fp32, with a forward pass for training only.

    Shapes never depend on the data and nothing reads back to the host, so a training step can be a CUDA graph.

    Args:
        seed: of the first weights.

    Attributes:
        expert_noise: standard deviation of the noise put on the experts' weights in each pass, relative to the root
            mean square of their row. Weights that tolerate it also tolerate quantisation. It is a tensor: a captured
            step reads its present value.
        expert_weights: what a pass computes with in place of experts' weights [E, rows, columns]; default: with noise.
    """

    expert_noise: Tensor

    def __init__(self, seed: int):
        super().__init__()
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        torch.manual_seed(seed)
        settings = {k: v for k, v in CONFIG.items() if k != "torch_dtype"}
        config = Qwen3MoeConfig(**settings, attn_implementation="sdpa")
        self.model: Any = Qwen3MoeForCausalLM(config).float().train()
        self.register_buffer("expert_noise", torch.zeros(()))
        self.block = self._block
        self.expert_weights: Callable[[Tensor], Tensor] = self._noisy

    def forward(self, ids: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, S, vocab_size] of ids [B, S], and the load-balancing loss over the tokens where real [B, S]."""
        inner: Any = self.model.model
        table = inner.embed_tokens.weight
        # a product: the gradient of an embedding is slow where many tokens share few rows
        hits = ids[..., None] == torch.arange(len(table), device=ids.device)
        x = (hits.to(table.dtype) @ table).float()
        rope = inner.rotary_emb(x, torch.arange(ids.shape[1], device=ids.device)[None])
        balance = x.new_zeros(())
        for layer in inner.layers:
            x, loss = self.block(layer, x, rope, real)
            balance = balance + loss
        return self.model.lm_head(inner.norm(x)), balance

    def _block(self, layer: Any, x: Tensor, rope: tuple[Tensor, Tensor], real: Tensor) -> tuple[Tensor, Tensor]:
        # no mask: scaled dot product attention is causal then, and padding only follows
        attended, _ = layer.self_attn(layer.input_layernorm(x), position_embeddings=rope, attention_mask=None)
        x = x + attended
        h = layer.post_attention_layernorm(x)
        if hasattr(layer.mlp, "experts"):
            out, balance = self._experts(layer.mlp, h, real)
            return x + out, balance
        return x + layer.mlp(h), x.new_zeros(())

    def _experts(self, block: Any, x: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """The block's output, every expert as a slice of two large products; and its load-balancing loss.

        The loss is E * sum over e of (share of tokens routed to e) * (mean probability of e): 1 when even. Source:
        Switch Transformers, https://arxiv.org/abs/2101.03961, equation 4.
        """
        E, K = CONFIG["num_experts"], CONFIG["num_experts_per_tok"]
        gate_up, down = (self.expert_weights(w) for w in (block.experts.gate_up_proj, block.experts.down_proj))
        I = down.shape[2]
        probabilities = torch.softmax(F.linear(x, block.gate.weight), dim=-1, dtype=torch.float32)
        weights, chosen = torch.topk(probabilities, K, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        routing = torch.zeros_like(probabilities).scatter(-1, chosen, weights)
        gate, up = F.linear(x, gate_up.flatten(0, 1)).unflatten(-1, (E, 2 * I)).chunk(2, dim=-1)
        hidden = F.silu(gate) * up * routing.to(gate.dtype)[..., None]
        out = F.linear(hidden.flatten(-2), down.transpose(0, 1).flatten(1))
        mask = real[..., None].float()
        count = mask.sum()
        share = ((routing > 0) * mask).sum((0, 1)) / (count * K)
        return out, E * (share.detach() * (probabilities * mask).sum((0, 1)) / count).sum()

    def _noisy(self, weight: Tensor) -> Tensor:
        scale = self.expert_noise * weight.detach().square().mean(-1, keepdim=True).sqrt()
        return weight + scale * torch.randn_like(weight)
