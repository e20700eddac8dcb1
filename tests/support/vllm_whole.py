"""Qwen3-MoE of vLLM on a CPU: its configuration, both models, and stand-ins for what vLLM has no CPU kernels for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 16
"""Tokens of one of vLLM's blocks."""


def config_of(folder: Path, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    given = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 256, "load_format": "dummy"}
    return EngineArgs(model=str(folder), **{"dtype": "float32", **given, **options}).create_engine_config()


@contextmanager
def ready(config: Any) -> Iterator[None]:
    from vllm.config import set_current_vllm_config

    before = torch.get_default_dtype()
    torch.set_default_dtype(config.model_config.dtype)
    try:
        with set_current_vllm_config(config), torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(before)


def built(config: Any, kind: Any, device: str = "cpu") -> Any:
    """A model with random weights, equal for equal seeds, its experts loaded."""
    with ready(config), torch.device(device):
        made = kind(vllm_config=config)
        if device == "meta":
            return made
        generator = torch.Generator().manual_seed(0)
        for _, weight in sorted(made.named_parameters()):
            weight.data.normal_(1 if weight.dim() == 1 else 0, 0.08, generator=generator)
        for layer in made.model.layers:
            experts = held(layer.mlp.experts)
            experts.quant_method.process_weights_after_loading(experts)
    return made


def kinds() -> tuple[Any, Any]:
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

    from ttnn_moe.integrations.vllm.qwen3 import Qwen3Moe

    return Qwen3Moe, Qwen3MoeForCausalLM


def held(experts: Any) -> Any:
    from ttnn_moe.integrations.vllm.adapter import held

    return held(experts)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [T, heads, D] after k, v [S, kv_heads, D], S >= T."""
    T, S = len(q), len(k)
    mask = torch.ones(T, S, dtype=torch.bool).tril(S - T)
    q, k, v = (x.transpose(0, 1).float() for x in (q, k, v))
    return F.scaled_dot_product_attention(q[None], k[None], v[None], mask, enable_gqa=True)[0].transpose(0, 1)


def one_sequence(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In place of vLLM's attention, which has no CPU kernels in a wheel for CUDA: all tokens are one sequence."""
    heads = (x.view(len(x), -1, self.head_size) for x in (q, k, v))
    return causal(*heads).flatten(1).to(q.dtype)


def softmax_route(hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool, **other: Any) -> Any:
    """In place of vLLM's CUDA kernel."""
    weights, ids = gating_output.float().softmax(-1).topk(topk)
    return weights / weights.sum(-1, keepdim=True) if renormalize else weights, ids.int(), None


def logits(model: Any, config: Any, ids: Tensor, positions: Tensor, metadata: Any = None) -> Tensor:
    from vllm.forward_context import set_forward_context

    with ready(config), set_forward_context(metadata, config):
        return F.linear(model.model(ids, positions), model.lm_head.weight).float()


def flash(
    self: Any, layer: Any, q: Tensor, key: Any, value: Any, kv_cache: Tensor, step: Any, output: Tensor
) -> Tensor:
    """In place of FlashAttention: causal attention to vLLM's blocks [2, blocks, BLOCK, kv_heads, D], or since 0.33
    [blocks, kv_heads, BLOCK, 2 D]."""
    parts = kv_cache.transpose(1, 2).split(self.head_size, -1) if kv_cache.dim() == 4 else kv_cache
    starts = step.query_start_loc.tolist()
    for row, (first, end) in enumerate(zip(starts, starts[1:], strict=False)):
        k, v = (kept[step.block_table[row].long()].flatten(0, 1)[: step.seq_lens[row]] for kept in parts)
        output[first:end] = causal(q[first:end], k, v).to(q.dtype)
    return output
