"""Attention over the paged cache: a prompt's pieces one after the other, or one token of every row."""

from __future__ import annotations

from typing import Any

from ttnn_moe.tenstorrent import Device, tensors
from ttnn_moe.tenstorrent.runtime import library

from .cache import PagedCache, Pass


class PrefillAttention:
    """Of one pass: each piece is written to its row's pages and attends to all that came before it."""

    def __init__(self, cache: PagedCache, of: Pass):
        self._cache, self._pieces = cache, of.pieces
        self._tables = [
            [tensors.replicate(table, cache.device) for table in cache.tables(piece)] for piece in of.pieces
        ]

    def __call__(self, layer: int, q: Any, k: Any, v: Any) -> Any:
        ttnn = library()

        caches = self._cache.k[layer], self._cache.v[layer]
        parts = []
        for piece, (written, seen) in zip(self._pieces, self._tables, strict=True):
            own = [_tokens(x, piece.first, piece.size) for x in (q, k, v)]
            for cache, x in zip(caches, own[1:], strict=True):
                ttnn.experimental.paged_fill_cache(cache, x, written, batch_idx=0)
            parts.append(ttnn.transformer.chunked_scaled_dot_product_attention(own[0], *caches, seen, piece.past))
        return parts[0] if len(parts) == 1 else ttnn.concat(parts, dim=2)


class DecodeAttention:
    """Of one token of every row: `positions` [B] int32 and `table` [B, pages] int32 are read on the device."""

    def __init__(self, cache: PagedCache, positions: Any, table: Any):
        self._cache, self._positions, self._table = cache, positions, table

    def __call__(self, layer: int, q: Any, k: Any, v: Any) -> Any:
        ttnn = library()

        k_cache, v_cache = self._cache.k[layer], self._cache.v[layer]
        q, k, v = (ttnn.transpose(x, 1, 2) for x in (q, k, v))  # [1, B, heads, head_dim]
        for cache, x in ((k_cache, k), (v_cache, v)):
            ttnn.experimental.paged_update_cache(
                cache, _a_core_each(x, self._cache.device), update_idxs_tensor=self._positions, page_table=self._table
            )
        out = ttnn.transformer.paged_scaled_dot_product_attention_decode(
            q, k_cache, v_cache, page_table_tensor=self._table, cur_pos_tensor=self._positions
        )
        return ttnn.transpose(out, 1, 2)


def _tokens(x: Any, first: int, n: int) -> Any:
    """n of the tokens of [1, heads, T, head_dim]."""
    ttnn = library()

    _, heads, T, size = (int(length) for length in x.shape)
    return x if n == T else ttnn.slice(x, [0, 0, first, 0], [1, heads, first + n, size])


def _a_core_each(x: Any, device: Device) -> Any:
    """[1, B, heads, head_dim] with each of the B in the L1 of a core of its own."""
    ttnn = library()

    B, size = int(x.shape[1]), int(x.shape[3])
    cores = ttnn.num_cores_to_corerangeset(B, device.handle.compute_with_storage_grid_size(), True)
    place = ttnn.create_sharded_memory_config(
        (32, size), core_grid=cores, strategy=ttnn.ShardStrategy.HEIGHT, use_height_and_width_as_shard_shape=True
    )
    return ttnn.to_memory_config(x, place)
