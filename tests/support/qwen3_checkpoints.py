"""Small random Qwen3-MoE checkpoints, made by transformers, and its logits for comparison."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3MoeConfig as HfConfig
from transformers import Qwen3MoeForCausalLM

from paths import TINY

HAS_TINY = (TINY / "config.json").is_file()

BASE = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "moe_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 256,
    "norm_topk_prob": True,
    "eos_token_id": 5,
    # large enough that logits spread and routing is decided
    "initializer_range": 0.1,
}

CONFIGS = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "dense-layer": {"mlp_only_layers": [1]},
    "sparse-step": {"decoder_sparse_step": 2},
    "all-dense": {"mlp_only_layers": [0, 1, 2]},
    "no-norm-topk": {"norm_topk_prob": False},
    "attention-bias": {"attention_bias": True},
    "one-kv-head": {"num_key_value_heads": 1},
    "no-gqa": {"num_key_value_heads": 4},
    "wide-heads": {"head_dim": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "every-expert": {"num_experts_per_tok": 8},
    # as large as the mean square of an embedding
    "large-eps": {"rms_norm_eps": 1e-2},
}


def make(
    directory: Path, dtype: torch.dtype = torch.float32, shards: str = "5GB", router_scale: float = 1.0, **changes
) -> Path:
    """Save a random checkpoint in which every parameter, norms and biases too, is random.

    router_scale: a large one makes the last of the K experts weigh little, as in trained models, so that
        rounding which swaps it for the next one changes little.
    """
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(HfConfig(**{**BASE, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1)
            elif name.endswith("mlp.gate.weight"):
                parameter.mul_(router_scale)
    model.to(dtype).save_pretrained(directory, max_shard_size=shards)
    return directory


def reference(directory: Path, dtype: torch.dtype = torch.float32) -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM.from_pretrained(directory, dtype=dtype).eval()


@torch.inference_mode()
def reference_logits(model: Qwen3MoeForCausalLM, ids: list[int]) -> torch.Tensor:
    """[S, vocab] of one sequence, by itself, without a cache."""
    return model(torch.tensor([ids]), use_cache=False).logits[0]


def prompts(lengths: list[int], vocab: int = BASE["vocab_size"], seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest over tokens of |got - expected| / |expected|; NaN counts as infinite."""
    got, expected = got.double().flatten(0, -2), expected.double().flatten(0, -2)
    error = ((got - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()
    return error if error == error else float("inf")
