"""What a BucketedCache asks of a model of transformers: its sizes, its kinds of layers, and its norms of heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ...errors import ContractError
from ...kv.cache import CacheSizes
from ...visible import said

NAME = "ttnn_moe_kv"
OTHERWISE = 'use another attention: model.set_attn_implementation("sdpa"), or "eager" for a model without sdpa'


def sizes_of(model: PreTrainedModel) -> CacheSizes:
    """The sizes of a model whose every layer a BucketedCache serves.

    Raises:
        ContractError: no model; another attention; first weights that are offloaded; layers that are no attention,
            share keys or differ in size.
    """
    if not isinstance(model, PreTrainedModel):
        raise ContractError(
            "a BucketedCache is made for a model of transformers",
            got=type(model).__name__,
            expected="a PreTrainedModel",
            remedy="BucketedCache(model, rows=..., capacity=..., bits=...)",
        )
    config = model.config.get_text_config()
    if config._attn_implementation != NAME:  # it would see the newest tokens alone
        raise ContractError(
            "the model's attention does not read a BucketedCache",
            got=f"attn_implementation={config._attn_implementation!r}",
            expected=repr(NAME),
            remedy=f'model.set_attn_implementation("{NAME}")',
        )
    if model.device.type == "meta":
        raise ContractError(
            "the model does not say on which device it runs",
            got="first weights on meta: accelerate offloads them",
            expected="first weights on the device that runs the model",
            remedy="BucketedCache(model, ...) before accelerate.cpu_offload(model); or a device_map that keeps the "
            "embedding on that device",
        )
    try:
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        D = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        kinds = _kinds(config, layers)
        sizes = CacheSizes(layers, heads, kv_heads, D, model.dtype, model.device)
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:  # RuntimeError: layers differ in a size
        raise ContractError(
            "the model's config gives no one size of attention for all layers",
            got=f"{type(model).__name__}: {said(error)}",
            expected="num_hidden_layers, num_attention_heads and head_dim, the same in all layers",
            remedy=OTHERWISE,
        ) from error
    if odd := [f"layer {i}: {kind}" for i, kind in enumerate(kinds) if kind != "attention"]:
        raise ContractError(
            "a BucketedCache serves models whose layers are all plain attention",
            got=", ".join(odd[:3]) + (", ..." if odd[3:] else ""),
            expected="attention with keys and values of its own in every layer",
            remedy=OTHERWISE,
        )
    return sizes


def shortest_window(model: PreTrainedModel) -> int | None:
    """Tokens of the shortest window or chunk that a layer attends to; None: all layers attend to all tokens."""
    layers = DynamicCache(config=model.config.get_text_config()).layers
    return min((layer.sliding_window for layer in layers if isinstance(layer, DynamicSlidingWindowLayer)), default=None)


def _kinds(config: Any, layers: int) -> list[str]:
    """What each layer keeps, by transformers' own cache for this config."""
    own = DynamicCache(config=config).layers or [DynamicLayer()] * layers
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    kinds = ["attention" if type(layer) in plain else type(layer).__name__ for layer in own]
    return (kinds + ["no cache of its own"] * layers)[:layers]


@torch.no_grad()
def head_norms(model: PreTrainedModel, name: str, D: int) -> Iterator[Tensor]:
    """By layer, how large each channel is after a norm of heads: RoPE mixes channel i with channel i + D / 2.

    The norm itself says so: some scale by 1 + weight, and accelerate may offload a weight.
    """
    heads = torch.tensor([1.0, -1.0], device=model.device).repeat(D // 2)[None]  # of mean 0 and mean square 1
    for key, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if key.endswith(f".{name}") and isinstance(weight, Tensor) and weight.shape == (D,):
            size = module(heads.to(weight.dtype))[0].to(model.device, torch.float32)
            yield size.square().unflatten(0, (2, -1)).mean(0).sqrt().repeat(2)


def equalisers(model: PreTrainedModel, sizes: CacheSizes) -> tuple[Tensor, Tensor] | None:
    """How large each channel of keys and queries is, [layers, D] each. None: the model has no norms of heads."""
    keys, queries = (list(head_norms(model, name, sizes.head_dim)) for name in ("k_norm", "q_norm"))
    if len(keys) == len(queries) == sizes.layers:
        return torch.stack(keys), torch.stack(queries)
    return None
