"""A plug-in of vLLM for vllm_serve.py: load format "ttnn_moe_random", Qwen3-MoE weights as qwen3_gpu.py draws them."""

from __future__ import annotations

from typing import Any

import torch

FORMAT = "ttnn_moe_random"
STD = 0.02


def order(layers: int) -> list[tuple[str, bool]]:
    """vLLM's names of the weights of one rank in the order in which qwen3_gpu.py draws them, and whether each is drawn.

    The others, norms, are 1.
    """
    found = [("model.embed_tokens.weight", True)]
    for layer in range(layers):
        at = f"model.layers.{layer}."
        norms = "input_layernorm", "self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm"
        found += [(f"{at}{name}.weight", False) for name in norms]
        drawn = "self_attn.qkv_proj.weight", "self_attn.o_proj.weight", "mlp.experts.w13_weight"
        found += [(at + name, True) for name in (*drawn, "mlp.experts.w2_weight", "mlp.gate.weight")]
    return [*found, ("model.norm.weight", False), ("lm_head.weight", True)]


@torch.no_grad()
def fill(parameters: dict[str, torch.Tensor], layers: int, seed: int = 0) -> None:
    """Fill all parameters in place.

    Raises:
        KeyError, ValueError: a model of another kind, or of several ranks.
    """
    embed = parameters["model.embed_tokens.weight"]
    generator = torch.Generator(embed.device).manual_seed(seed)
    names = order(layers)
    for name, drawn in names:
        weight = parameters[name].data
        weight.normal_(0, STD, generator=generator) if drawn else weight.fill_(1)
    embed.data.normal_(0, 1, generator=torch.Generator(embed.device).manual_seed(seed + 1))
    if left := set(parameters) - {name for name, _ in names}:
        raise ValueError(f"parameters that the benchmark does not know: {sorted(left)[:5]}")


def register() -> None:
    """For the entry point group vllm.general_plugins."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader(FORMAT)
    class RandomLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            fill(dict(model.named_parameters()), model_config.hf_config.num_hidden_layers)
