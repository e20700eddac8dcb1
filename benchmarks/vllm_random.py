"""A plug-in of vLLM for vllm_serve.py and vllm_ranks.py: load format "ttnn_moe_random".

Qwen3-MoE weights are as qwen3_gpu.py draws them. A rank draws every weight whole and keeps its part, so all splits hold
the same model. Weights of gpt-oss are random too, on one GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FORMAT = "ttnn_moe_random"
STD = 0.02


@dataclass(frozen=True)
class Rank:
    """One rank's part of the weights.

    Attributes:
        tp, of: its number among the tensor-parallel ranks, and theirs.
        heads, kv_heads: of all ranks. kv_heads is a multiple of `of`.
        experts: [E_local], the experts it holds; None: all, each split among the tensor-parallel ranks.
    """

    tp: int = 0
    of: int = 1
    heads: int = 1
    kv_heads: int = 1
    experts: Tensor | None = None

    @property
    def whole(self) -> bool:
        return self.of == 1 and self.experts is None

    def drawn(self, name: str, here: Tensor, E: int, generator: torch.Generator, std: float) -> Tensor:
        """This rank's part of a weight of normal numbers. here: a tensor of its shape."""
        shape, kind = list(here.shape), name.rsplit(".", 2)[-2] if name.endswith(".weight") else name.rsplit(".", 1)[-1]
        split = {"embed_tokens": 0, "lm_head": 0, "qkv_proj": 0, "o_proj": 1, "w13_weight": 1, "w2_weight": 2}.get(kind)
        expert = kind in ("w13_weight", "w2_weight")
        if expert and self.experts is not None:
            shape[0], split = E, None
        if split is not None:
            shape[split] *= self.of
        found = here.new_empty(shape).normal_(0, std, generator=generator)
        if expert and self.experts is not None:
            return found[self.experts.to(here.device)]
        if split is None or self.of == 1:
            return found
        if kind == "qkv_proj":
            unit = shape[0] // (self.heads + 2 * self.kv_heads)
            parts = found.split([self.heads * unit, self.kv_heads * unit, self.kv_heads * unit])
        else:  # gate rows, then up rows
            parts = found.chunk(2, split) if kind == "w13_weight" else (found,)
        return torch.cat([part.chunk(self.of, split)[self.tp] for part in parts], split)


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
def fill(parameters: dict[str, Tensor], layers: int, seed: int = 0, rank: Rank | None = None) -> None:
    """Fill all parameters in place.

    Raises:
        KeyError, ValueError: a model of another kind.
    """
    rank = rank or Rank()
    embed = parameters["model.embed_tokens.weight"]
    generator = torch.Generator(embed.device).manual_seed(seed)
    names = order(layers)
    for name, drawn in names:
        weight = parameters[name].data
        if not drawn:
            weight.fill_(1)
        elif rank.whole:
            weight.normal_(0, STD, generator=generator)
        else:
            E = len(parameters[f"{name.rsplit('.', 2)[0]}.gate.weight"]) if ".experts." in name else 0
            weight.copy_(rank.drawn(name, weight, E, generator, STD))
    again = torch.Generator(embed.device).manual_seed(seed + 1)
    embed.data.copy_(rank.drawn("model.embed_tokens.weight", embed.data, 0, again, 1))
    if left := set(parameters) - {name for name, _ in names}:
        raise ValueError(f"parameters that the benchmark does not know: {sorted(left)[:5]}")


@torch.no_grad()
def fill_gpt_oss(parameters: dict[str, Tensor], seed: int = 0) -> None:
    """Fill all parameters in place: any e2m1 numbers in experts, normal numbers elsewhere.

    Experts add about a tenth of the embedding to the residual stream, so that a close call of a router changes little.
    """
    generator = torch.Generator(next(iter(parameters.values())).device).manual_seed(seed)
    for name in sorted(parameters):
        weight = parameters[name].data
        if weight.dtype == torch.uint8:
            # e2m1 numbers have a root mean square of 2.9
            least, end = ((114, 118) if ".w2_" in name else (117, 121)) if name.endswith("_scale") else (0, 256)
            weight.random_(least, end, generator=generator)
        elif "norm" in name:
            weight.fill_(1)
        else:
            weight.normal_(0, 1 if "embed" in name or name.endswith("sinks") else STD, generator=generator)


def rank_of(model: torch.nn.Module, config: Any) -> Rank:
    """The part of a model that this process of vLLM's holds."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    local = next((layer.expert_map for name, layer in model.named_modules() if name.endswith(".mlp.experts")), None)
    if local is not None:
        local = local.cpu()
        local = torch.tensor([int((local == index).nonzero()) for index in range(int((local >= 0).sum()))])
    of = get_tensor_model_parallel_world_size()
    return Rank(get_tensor_model_parallel_rank(), of, config.num_attention_heads, config.num_key_value_heads, local)


def register() -> None:
    """For the entry point group vllm.general_plugins."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader(FORMAT)
    class RandomLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            config = model_config.hf_config
            if config.model_type == "gpt_oss":
                fill_gpt_oss(dict(model.named_parameters()))
                return
            fill(dict(model.named_parameters()), config.num_hidden_layers, rank=rank_of(model, config))
