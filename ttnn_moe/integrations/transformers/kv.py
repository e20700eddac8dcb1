"""A bucketed KV cache for models of transformers: the attention "ttnn_moe_kv" and the cache that it reads.

model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="ttnn_moe_kv")
model.generate(**inputs, past_key_values=BucketedCache(model, rows=1, capacity=32768, bits=3))
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

from ...errors import ContractError
from ...kv.bucketed.cache import BucketedCache as Rows
from ...kv.cache import CacheSizes
from ...kv.step import Step

NAME = "ttnn_moe_kv"
LAYER = "_ttnn_moe_kv_layer"


class BucketedLayer(CacheLayerMixin):
    """One layer's part of a BucketedCache. `update` hands the new keys to the attention, which writes them."""

    is_sliding = False

    def __init__(self, cache: BucketedCache, layer: int):
        super().__init__()
        self.cache, self.layer, self.seen = cache, layer, 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys and values [B, kv_heads, n, D] as they came; the keys carry this layer."""
        self.seen += key_states.shape[2]
        setattr(key_states, LAYER, self)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return self.cache.rows.capacity

    def reset(self) -> None:
        self.seen = 0
        if self.layer == 0:
            self.cache.start()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise ContractError("a bucketed cache serves no beam search", remedy="generate with num_beams=1")

    def offload(self) -> None:
        """Nothing: tiers stay where they are."""

    def prefetch(self) -> None:
        """Nothing: tiers stay where they are."""


class BucketedCache(Cache):
    """Keys and values of a model of transformers, in tiers of 2 to 16 bits: see docs/kv.md.

    Args:
        model: whose attention is "ttnn_moe_kv". rows: sequences of a batch, at most.
        capacity: tokens of each, prompt and new ones. bits: average bits of a number in a full row.

    Raises:
        ContractError: the model has another attention; head_dim is no multiple of 32.
        RequestError: a budget that no mix of tiers reaches; the machine has less memory.
    """

    def __init__(self, model: PreTrainedModel, rows: int = 1, capacity: int = 4096, bits: float = 4.0):
        config = model.config.get_text_config()
        if config._attn_implementation != NAME:  # it would see the newest tokens alone
            raise ContractError(
                "the model's attention does not read a BucketedCache",
                got=f"attn_implementation={config._attn_implementation!r}",
                expected=repr(NAME),
                remedy=f'model.set_attn_implementation("{NAME}")',
            )
        heads = config.num_attention_heads
        D = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        sizes = CacheSizes(config.num_hidden_layers, heads, kv_heads, D, model.dtype, model.device)
        self.rows = Rows.within(sizes, rows, capacity, 1 << 62, bits=bits)
        keys, queries = (list(_norms(model, name, D)) for name in ("k_norm", "q_norm"))
        if len(keys) == len(queries) == sizes.layers:
            self.rows.equalise(torch.stack(keys), torch.stack(queries))
        self.opened = False
        self.places: list[Tensor] = []
        self.step: Step | None = None
        self.start()
        super().__init__(layers=[BucketedLayer(self, i) for i in range(sizes.layers)])

    def start(self) -> None:
        """Forget every token."""
        for row in range(self.rows.rows):
            if self.opened:
                self.rows.close(row)
            self.rows.open(row, self.rows.capacity)
        self.opened, self.lengths = True, [0] * self.rows.rows

    def plan(self, B: int, n: int, mask: Tensor | None) -> None:
        """Before the first layer of a pass: which of B x n new tokens are there, and the step that they make."""
        if self.rows.rows < B:
            raise ContractError(
                "the batch has more rows than the cache",
                got=B,
                expected=f"at most {self.rows.rows}",
                remedy=f"BucketedCache(model, rows={B}, ...); beams are not served",
            )
        there = torch.ones(B, n, dtype=torch.bool) if mask is None else mask[:, -n:].bool().cpu()
        self.there = there.flatten().nonzero().flatten().to(self.rows.sizes.device)
        counts = there.sum(1).tolist()
        if all(count == 1 for count in counts) and n == 1 and all(self.lengths[:B]):
            self.step = self.rows.decode(range(B), self.lengths[:B])
        else:
            for row in range(B):
                self.rows.lengths[row] = self.lengths[row]
            total = sum(counts)
            self.step = self.rows.prefill([(row, count) for row, count in enumerate(counts) if count], range(total))
        for row, count in enumerate(counts):
            self.lengths[row] += count


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
        ContractError: another cache; a sliding window shorter than the cache's rows; soft caps or sinks.
    """
    B, heads, n, D = query.shape
    layer = cast("BucketedLayer | None", getattr(key, LAYER, None))
    if layer is None:
        if key.shape[2] != n or attention_mask is not None:
            raise ContractError(
                f'attn_implementation="{NAME}" reads a BucketedCache alone',
                got="another cache, or a padded batch without a cache",
                remedy="pass past_key_values=BucketedCache(model, ...)",
            )
        return cast(
            "tuple[Tensor, None]", sdpa_attention_forward(module, query, key, value, None, scaling=scaling, **kwargs)
        )
    window = kwargs.get("sliding_window")
    odd = [name for name in ("softcap", "s_aux") if kwargs.get(name) is not None]
    if odd or (window is not None and window < layer.get_max_length()):
        raise ContractError(
            "a bucketed cache serves plain causal attention",
            got=", ".join(odd) or f"a sliding window of {window} tokens in rows of {layer.get_max_length()}",
            remedy="use another attn_implementation" if odd else "make the cache with a smaller capacity",
        )
    cache = layer.cache
    if layer.layer == 0:
        cache.plan(B, n, attention_mask)
    step, there = cache.step, cache.there
    assert step is not None, "layers run in order"
    q, k, v = (x.transpose(1, 2).flatten(0, 1)[there] for x in (query, key, value))
    if scaling is not None:
        q = q * (scaling * D**0.5)
    cache.rows.write(layer.layer, k, v, step)
    out = query.new_zeros(B * n, heads, D)
    out[there] = cache.rows.attend(layer.layer, q, step)
    return out.view(B, n, heads, D), None


def _norms(model: PreTrainedModel, name: str, D: int) -> Iterator[Tensor]:
    """By layer, how large each channel is after a norm of heads: RoPE mixes channel i with channel i + D / 2."""
    for key, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if key.endswith(f".{name}") and isinstance(weight, Tensor) and weight.shape == (D,):
            yield weight.detach().float().square().unflatten(0, (2, -1)).mean(0).sqrt().repeat(2)


def register() -> None:
    """Make `attn_implementation="ttnn_moe_kv"` known."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, flash_attention_mask)
