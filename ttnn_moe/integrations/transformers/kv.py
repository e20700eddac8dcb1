"""A bucketed KV cache for models of transformers: the attention "ttnn_moe_kv" and the cache that it reads.

model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="ttnn_moe_kv")
model.generate(**inputs, past_key_values=BucketedCache(model, rows=1, capacity=32768, bits=3))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, flash_attention_mask, sdpa_mask

from ...accelerator import on_host
from ...errors import ContractError, GradientsRefused
from .kv_cache import BucketedCache, check_window
from .kv_layer import LAYER, BucketedLayer
from .kv_model import NAME, OTHERWISE

__all__ = ["NAME", "BucketedCache", "attention", "mask", "register"]

ODD = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices")
"""What models pass to an attention that changes its result."""


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of query [B, heads, n, D] to a BucketedCache -> [B, n, heads, D]. Without a cache, torch's.

    Raises:
        ContractError: another cache; keys that changed after update(); a mask that is not causal, a window shorter than
            what is attended, soft caps, sinks; with a cache: dropout, and what BucketedCache.plan refuses.
        RequestError: a row of the cache is full.
        GradientsRefused: by a backward pass through the attention to a cache.
    """
    layer = cast("BucketedLayer | None", getattr(key, LAYER, None))
    if layer is not None:
        cast("BucketedCache", layer.cache).take(layer.layer, key, value)
    if odd := [name for name in ODD if kwargs.get(name) is not None]:
        _refuse(", ".join(odd))
    if layer is not None:
        return _cached(module, layer, query, key, value, attention_mask, scaling, dropout, kwargs), None
    n, window = query.shape[2], kwargs.get("sliding_window")
    if key.shape[2] != n or (attention_mask is not None and attention_mask.dim() != 4):
        raise ContractError(
            f'attn_implementation="{NAME}" reads a BucketedCache alone',
            got="another cache, or a padded batch without a cache",
            remedy="pass past_key_values=BucketedCache(model, ...); generate() without guidance_scale, whose second "
            "pass has a cache of its own",
        )
    if attention_mask is None and window is not None and window < n:
        _refuse(f"a sliding window of {window} for {n} tokens, and no mask that holds it")
    return cast(
        "tuple[Tensor, None]",
        sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs),
    )


@torch.compiler.disable
def _cached(
    module: Any,
    layer: BucketedLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> Tensor:
    check_window(kwargs.get("sliding_window"), layer.get_max_length())
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        _refuse("attention that is not causal")
    if mask is not None and mask.dim() != 2:
        _refuse(f"a mask of {mask.dim()} dimensions: a window, chunks, packed sequences, or a mask of the caller")
    if kwargs.get("cu_seq_lens_q") is not None:
        _refuse("packed sequences (cu_seq_lens_q)")
    if dropout:
        _refuse(f"dropout of {dropout}", "model.eval()")
    B, heads, n, D = query.shape
    cache = cast("BucketedCache", layer.cache)
    sizes = cache.rows.sizes
    if heads != sizes.heads:
        cache.refuse_sizes(f"{heads} heads of queries", f"{sizes.heads} heads")
    if layer.layer == 0:
        cache.plan(B, n, mask, kwargs.get("position_ids"))
    step, there = cache.step, cache.there
    assert step is not None, "layers run in order"

    def run() -> Tensor:
        with torch.autocast(query.device.type, enabled=False), on_host():
            q, k, v = (x.to(sizes.dtype).transpose(1, 2).flatten(0, 1)[there] for x in (query, key, value))
            if scaling is not None:
                q = q * (scaling * D**0.5)
            cache.rows.write(layer.layer, k, v, step)
            out = query.new_zeros(B * n, heads, D)
            out[there] = cache.rows.attend(layer.layer, q, step).to(out.dtype)
            return out.view(B, n, heads, D)

    out = cast(Tensor, _Inference.apply(run, query, key, value))
    cache.written(layer.layer, n)
    return out


def mask(**kwargs: Any) -> Tensor | None:
    """The mask of a pass: None or that of padding [B, tokens] where attention is causal, else [B, 1, n, tokens].

    A BucketedCache serves the first two. Takes what transformers gives every function of AttentionMaskInterface.
    """
    local = kwargs.get("local_size")
    whole = local is not None and kwargs["kv_length"] <= local and kwargs.get("allow_is_causal_skip", True)
    if whole or kwargs.get("mask_function", causal_mask_function) is causal_mask_function:
        return cast("Tensor | None", flash_attention_mask(**kwargs))
    return cast("Tensor | None", sdpa_mask(**{**kwargs, "allow_is_bidirectional_skip": False}))


def _refuse(got: str, remedy: str = OTHERWISE) -> NoReturn:
    raise ContractError(
        f'attn_implementation="{NAME}" computes plain causal attention',
        got=got,
        expected="each token attends to all tokens before it",
        remedy=remedy,
    )


class _Inference(torch.autograd.Function):
    """apply(run, *inputs) -> run(), whose backward pass raises."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Tensor], *inputs: Tensor) -> Tensor:
        return run()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        raise _gradients()

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise _gradients()


def _gradients() -> GradientsRefused:
    return GradientsRefused(
        "the attention to a BucketedCache is for inference: it has no gradients",
        remedy='to train, model.set_attn_implementation("sdpa"); else call the model under torch.no_grad()',
    )


def register() -> None:
    """Make `attn_implementation="ttnn_moe_kv"` known."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
