"""Attention over the paged cache: the pieces of a pass one after the other, or one token of each row.

k_cache and v_cache are ttnn [pages, kv_heads, PAGE, head_dim] of one layer; q, k and v are [1, heads, T, head_dim].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ttnn_moe.tenstorrent import Device
from ttnn_moe.tenstorrent.memory import PAGE
from ttnn_moe.tenstorrent.runtime import library

from .passes import Piece

TILE = 32
SPAN = PAGE
"""Queries, and keys, that a core takes at a time."""


@dataclass(frozen=True)
class Exact:
    """How attention multiplies, sums and exponentiates.

    Attributes:
        products: ttnn's compute kernel config. powers: SDPAProgramConfig; without one ttnn approximates exp.
    """

    products: Any
    powers: Any

    @classmethod
    def of(cls, device: Device, products: Any) -> Exact:
        ttnn = library()

        powers = ttnn.SDPAProgramConfig(
            compute_with_storage_grid_size=ttnn.CoreCoord(*device.machine.grid),
            q_chunk_size=SPAN,
            k_chunk_size=SPAN,
            exp_approx_mode=False,
        )
        return cls(products, powers)


@dataclass(frozen=True)
class PieceTables:
    """A piece, and ttnn int32 pages [1, any]: those that it is written to, and those that it attends to."""

    piece: Piece
    written: Any
    seen: Any


@dataclass(frozen=True)
class PrefillTables:
    """Where the pieces of a pass lie in the cache."""

    pieces: Sequence[PieceTables]

    def write(self, k_cache: Any, v_cache: Any, k: Any, v: Any) -> None:
        """Write each piece to the pages of its row."""
        ttnn = library()

        for one in self.pieces:
            for cache, x in ((k_cache, k), (v_cache, v)):
                own = _tokens(x, one.piece)
                if own.dtype != cache.dtype:  # this operator copies tiles; those of a decode step convert
                    own = ttnn.typecast(own, cache.dtype)
                ttnn.experimental.paged_fill_cache(cache, own, one.written, batch_idx=0)

    def attend(self, k_cache: Any, v_cache: Any, q: Any, exact: Exact | None = None) -> Any:
        """Causal attention of each piece to its row, the piece included -> as q."""
        ttnn = library()

        attention = partial(ttnn.transformer.chunked_scaled_dot_product_attention, **_options(exact))
        parts = [attention(_tokens(q, p.piece), k_cache, v_cache, p.seen, p.piece.past) for p in self.pieces]
        return parts[0] if len(parts) == 1 else ttnn.concat(parts, dim=2)


@dataclass(frozen=True)
class DecodeTables:
    """Where one token of each of B rows lies in the cache; the device reads it in every step.

    Attributes:
        positions: ttnn [B] int32. table: ttnn [B, pages of a row] int32.
    """

    device: Device
    positions: Any
    table: Any

    def write(self, k_cache: Any, v_cache: Any, k: Any, v: Any) -> None:
        """Write a token of each row."""
        ttnn = library()

        where = {"update_idxs_tensor": self.positions, "page_table": self.table}
        places, k, v = _a_core_each(k, self.device), ttnn.transpose(k, 1, 2), ttnn.transpose(v, 1, 2)
        k, v = (ttnn.to_memory_config(x, place) for x, place in zip((k, v), places, strict=True))
        if places[0] is not places[1]:
            ttnn.experimental.paged_fused_update_cache(k_cache, k, v_cache, v, **where)
            return
        for cache, x in ((k_cache, k), (v_cache, v)):
            ttnn.experimental.paged_update_cache(cache, x, **where)

    def attend(self, k_cache: Any, v_cache: Any, q: Any, exact: Exact | None = None) -> Any:
        """Attention of each token to its row -> as q."""
        ttnn = library()

        q = ttnn.transpose(q, 1, 2)
        _, B, heads, size = (int(length) for length in q.shape)
        whole = (1, B, TILE, size)
        # ttnn approximates exp in half a tile of heads, so all rows of the tile attend: those of padding to no avail
        widened = heads < TILE and int(k_cache.shape[1]) == 1
        out = ttnn.transformer.paged_scaled_dot_product_attention_decode(
            ttnn.reshape(q, whole, whole) if widened else q,
            k_cache,
            v_cache,
            page_table_tensor=self.table,
            cur_pos_tensor=self.positions,
            **_options(exact),
        )
        return ttnn.transpose(ttnn.reshape(out, (1, B, heads, size), whole) if widened else out, 1, 2)


def _options(exact: Exact | None) -> dict[str, Any]:
    """Arguments of ttnn's attention; None: ttnn's own settings."""
    return {} if exact is None else {"compute_kernel_config": exact.products, "program_config": exact.powers}


def _tokens(x: Any, piece: Piece) -> Any:
    """The piece's tokens of x [1, heads, T, head_dim]."""
    ttnn = library()

    _, heads, T, size = (int(length) for length in x.shape)
    if piece.size == T:
        return x
    return ttnn.slice(x, [0, 0, piece.first, 0], [1, heads, piece.first + piece.size, size])


def _a_core_each(x: Any, device: Device) -> tuple[Any, Any]:
    """Where tokens of x [1, heads, B, head_dim] lie to be written, each in the L1 of its own core: keys, values.

    Both are written at once from different cores; a device of fewer than 2 B cores has one place for both.
    """
    ttnn = library()

    B, size = int(x.shape[2]), int(x.shape[3])
    key = "a core each", B, size
    if key not in device.cache:
        columns, rows = device.machine.grid
        whole = ttnn.CoreRangeSet({ttnn.CoreRange(ttnn.CoreCoord(0, 0), ttnn.CoreCoord(columns - 1, rows - 1))})

        def place(first: int) -> Any:
            start = ttnn.CoreCoord(first % columns, first // columns)
            cores = ttnn.num_cores_to_corerangeset_in_subcoregrids(start, B, whole, True)
            return ttnn.create_sharded_memory_config(
                (32, size),
                core_grid=cores,
                strategy=ttnn.ShardStrategy.HEIGHT,
                use_height_and_width_as_shard_shape=True,
            )

        keys = place(0)
        device.cache[key] = keys, place(B) if 2 * B <= columns * rows else keys
    return device.cache[key]
