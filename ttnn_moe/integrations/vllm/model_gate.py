"""Which engines this package's decoder layers serve, inside vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.platforms import current_platform

from ...cuda.attention.memory import why_not_heads
from ...visible import shown
from . import gate, setting
from .surface import ATTENTION, SIDE_BY_SIDE, installed

_DTYPES = (torch.bfloat16, torch.float16)
_ROPES = ("default", "yarn")
_BRING_BUFFERS = ("ipc_cache", "tensorizer")


def why_not(config: Any) -> str | None:
    """Why vLLM's own model runs; None: this package's layers may. config: vLLM's VllmConfig."""
    parallel, text = config.parallel_config, config.model_config.hf_text_config
    offload, loader = config.offload_config, config.load_config.load_format
    asked = {
        # it makes a model on meta, and puts other buffers in place of those that layers share
        f"its buffers come with its weights (--load-format {loader})": loader in _BRING_BUFFERS,
        # vLLM brings them when it calls a layer; an operator here is parts of two
        "weights are on the host (offloading)": offload.uva.cpu_offload_gb > 0
        or offload.prefetch.offload_group_size > 0,
        "the checkpoint is quantised": config.quant_config is not None,
        "LoRA adapters change weights by request": config.lora_config is not None,
        "a draft model reads hidden states (speculative decoding)": config.speculative_config is not None,
        "its layers are split between GPUs (pipeline parallelism)": parallel.pipeline_parallel_size > 1,
        "experts move between ranks (EPLB)": parallel.enable_eplb,
        "keys and values are split between GPUs (context parallelism)": parallel.decode_context_parallel_size > 1,
        "keys and values leave the GPU (a KV connector)": config.kv_transfer_config is not None,
        "a window bounds its attention": config.cache_config.sliding_window is not None,
        "its attention is in chunks": getattr(text, "dual_chunk_attention_config", None) is not None,
    }
    for reason, given in asked.items():
        if given:
            return reason
    if config.model_config.dtype not in _DTYPES and current_platform.is_cuda():
        return f"its dtype is {shown(str(config.model_config.dtype))}, neither bf16 nor fp16"
    rope = _why_not_rope(getattr(text, "rope_parameters", None) or {})
    if rope is not None:
        return rope
    if current_platform.is_cuda():
        capability = current_platform.get_device_capability()
        if capability is None or capability < (8, 0):
            return "the GPU is older than compute capability 8.0"
    elif not setting.names_backend():
        return "only CUDA GPUs are served"
    return gate.why_not_together(parallel)


def _why_not_rope(rope: Mapping[str, Any]) -> str | None:
    kind = rope.get("rope_type", "default")
    if kind not in _ROPES:
        return f"its RoPE is {shown(kind)}, not one of {', '.join(_ROPES)}"
    if "mrope_section" in rope:
        return "a token has three positions (M-RoPE)"
    if rope.get("partial_rotary_factor", 1) != 1 or rope.get("rope_dim"):
        return "its RoPE turns a part of each head"
    return None


def own_attention(config: Any) -> bool:
    """Whether this package's kernels may take vLLM's cache: it is there, in the model's dtype and in blocks that they
    know, and nobody asked for another."""
    cache, model = config.cache_config, config.model_config
    return (
        current_platform.is_cuda()
        and config.attention_config.backend is None
        and cache.cache_dtype == "auto"
        and not (cache.user_specified_block_size and cache.block_size & (cache.block_size - 1))
        and any(one.why_not(installed) is None for one in (ATTENTION, SIDE_BY_SIDE))
        and why_not_heads(model.hf_text_config.num_attention_heads, 1, model.get_head_size()) is None
    )


def own_experts(mlp: Any) -> bool:
    """Whether a layer's experts may be called from here: all tokens are on every rank, and none is shared."""
    return mlp.shared_expert is None and not mlp.is_sequence_parallel
