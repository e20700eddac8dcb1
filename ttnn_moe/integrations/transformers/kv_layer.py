"""One layer of a BucketedCache, as transformers knows layers of caches."""

from __future__ import annotations

import weakref
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ...errors import ContractError

LAYER = "_ttnn_moe_kv_layer"
"""The attribute of keys that names their BucketedLayer."""


class Owner(Protocol):
    """What a layer asks of its BucketedCache.

    Attributes:
        capacity: tokens of a row.
    """

    @property
    def capacity(self) -> int: ...
    def expect(self, layer: int, key: Tensor, value: Tensor) -> None: ...
    def start(self) -> None: ...


class BucketedLayer(CacheLayerMixin):
    """One layer's part of a BucketedCache. `update` hands the new keys to the attention, which writes them."""

    is_sliding = False

    def __init__(self, cache: Owner, layer: int):
        super().__init__()
        self.layer, self.seen = layer, 0
        self.is_initialized = True
        self.belong(cache)

    def belong(self, cache: Owner) -> None:
        """Be a layer of this cache; the first call stays."""
        if "_cache" not in self.__dict__:
            self._cache = weakref.ref(cache)  # else the memory stays until a garbage collection

    @property
    def cache(self) -> Owner:
        """That this is a layer of."""
        cache = self._cache()
        assert cache is not None, "who runs the model holds its cache"
        return cache

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_cache"}

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    @torch.compiler.disable
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Keys and values [B, kv_heads, n, D] as they came; the keys carry this layer.

        Raises:
            ContractError: see BucketedCache.expect.
        """
        self.cache.expect(self.layer, key_states, value_states)
        setattr(key_states, LAYER, self)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return self.cache.capacity

    get_max_cache_shape = get_max_length  # its name in transformers 5.7

    def reset(self) -> None:
        self.seen = 0
        if self.layer == 0:
            self.cache.start()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise ContractError("a bucketed cache serves no beam search", remedy="generate with num_beams=1")

    def crop(self, *args: Any) -> NoReturn:
        raise ContractError(
            "a bucketed cache takes no token back",
            got="crop(), which assisted generation and prompt lookup call",
            expected="a cache that only grows",
            remedy="generate without assistant_model and prompt_lookup_num_tokens; or cache.reset() and pass all again",
        )

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        self.keep_rows(f"batch_repeat_interleave({repeats})")

    def batch_select_indices(self, indices: Tensor) -> NoReturn:
        self.keep_rows("batch_select_indices()")

    def keep_rows(self, got: str) -> NoReturn:
        raise ContractError(
            "a bucketed cache does not move rows",
            got=got,
            expected="the same rows in every pass",
            remedy="cache.reset() and pass the new batch from its first token",
        )

    def offload(self) -> None:
        """Nothing: tiers stay where they are."""

    def prefetch(self) -> None:
        """Nothing: tiers stay where they are."""
