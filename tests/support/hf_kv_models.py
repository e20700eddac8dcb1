"""Small models of transformers for the tests of the attention "ttnn_moe_kv"."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from ttnn_moe.integrations.transformers.kv import NAME

SMALL = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 199,
}
OWN: dict[str, dict[str, Any]] = {
    "Qwen3": {},
    "Llama": {},
    "Mistral": {"sliding_window": None},
    "Gemma2": {"sliding_window": 4096},
    "Gemma3": {"sliding_window": 8},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4096},
    "Llama4": {
        "intermediate_size_mlp": 64,
        "attention_chunk_size": 8,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "no_rope_layers": [1, 1],
    },
    "DeepseekV3": {
        "head_dim": None,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 2,
    },
    "JetMoe": {"kv_channels": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    "DiffLlama": {},
    "Qwen3Next": {
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "FalconH1": {"mamba_d_ssm": 64, "mamba_n_heads": 2, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1},
}


def model_of(name: str, attention: str = NAME, **changes: Any) -> Any:
    """A random model, the same at every call with the same sizes. name: of the class, without ForCausalLM."""
    config = getattr(transformers, f"{name}Config", None) if name not in ("Llama4", "Gemma3") else None
    config = config or getattr(transformers, f"{name}TextConfig")
    sizes = {key: value for key, value in {**SMALL, **OWN[name], **changes}.items() if key != "head_dim" or value}
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(config(**sizes), attn_implementation=attention)
    return model.eval()


def ids_of(tokens: int = 24, rows: int = 1) -> Tensor:
    """Random tokens, the same at every call, none of them special."""
    return torch.randint(1, 198, (rows, tokens), generator=torch.Generator().manual_seed(1))


def apart(got: Tensor, want: Tensor) -> float:
    """The relative error; 16 bits cost about 0.005."""
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())
