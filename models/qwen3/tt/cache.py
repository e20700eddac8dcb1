"""The KV cache on the device, in pages of one tile's height."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ttnn_moe.arguments import integer
from ttnn_moe.errors import RequestError
from ttnn_moe.kv.cache import CacheSizes
from ttnn_moe.kv.formats import EIGHT_BITS, PAGED
from ttnn_moe.kv.pages import MOST, MOST_ROWS, PagedRows
from ttnn_moe.sizes import ceil_div, power_of_2
from ttnn_moe.tenstorrent import Device, tensors
from ttnn_moe.tenstorrent.memory import PAGE, tensor_bytes

from .attention import Exact, PieceTables, PrefillTables
from .passes import Packer, Pass, Piece
from .room import room_for

MAX_ROWS = 32
"""Sequences at a time: a token of each fills one tile."""


def check_rows(rows: int) -> int:
    """rows as an int. Raises RequestError if it is none, or more sequences than run at a time."""
    rows = integer("rows", rows, high=MOST_ROWS)
    if rows > MAX_ROWS:
        raise RequestError(
            "too many sequences at a time for the device",
            got=rows,
            expected=f"at most {MAX_ROWS}",
            remedy="generate in several batches, or make an engine of fewer rows: other requests wait for one",
        )
    return rows


def check_kv(form: str) -> None:
    """Raise RequestError if the chips keep keys and values in no such format."""
    if form not in CACHES:
        raise RequestError(
            "Tenstorrent chips have no such KV cache",
            got=f"kv={form}",
            expected=f"one of {[PAGED, EIGHT_BITS]}",
            remedy="leave kv out, or use a GPU",
        )


class PagedCache(PagedRows):
    """Keys and values of up to 32 sequences; a chip of a mesh holds those of its own heads.

    Args:
        sizes: of a chip's part of the model; its device is the host, where steps are planned.
        device: the chips. rows: sequences at a time. capacity: tokens of each, at most; rounded up to whole pages.
        pages: of all rows together; default: as many as the rows can use.
        packer: cuts prefill steps into passes.

    Attributes:
        form: their format.
        k, v: for each layer, ttnn [1 + pages, kv_heads, PAGE, head_dim] in tiles. Page 0 takes padding tokens.

    Raises:
        RequestError: no rows or more than 32, sizes that are no integers, or no room on the device.
    """

    default_page = PAGE
    form: ClassVar[str] = "bfloat16"

    def __init__(
        self, sizes: CacheSizes, device: Device, rows: int, capacity: int, packer: Packer, pages: int | None = None
    ):
        rows, capacity = check_rows(rows), integer("capacity", capacity, high=MOST)
        super().__init__(sizes, rows, capacity, rows * ceil_div(capacity, PAGE) if pages is None else pages, PAGE)
        self.device, self.packer = device, packer
        shape = (1 + self.pool.n, sizes.kv_heads, PAGE, sizes.head_dim)
        held = f"{self.pool.n * self.page_bytes(sizes) / 2**20:.0f} MiB for {rows} sequences of {capacity} tokens"
        with room_for("the KV cache", held, "fewer or shorter sequences at a time"):
            made = [[tensors.zeros(shape, self.form, "TILE", device) for _ in range(2)] for _ in range(sizes.layers)]
        self.k, self.v = [k for k, _ in made], [v for _, v in made]

    @classmethod
    def page_bytes(cls, sizes: CacheSizes, page: int | None = None) -> int:
        return 2 * sizes.layers * tensor_bytes(((sizes.kv_heads, PAGE, sizes.head_dim), cls.form, "TILE"))

    def open(self, row: int, tokens: int) -> None:
        super().open(row, tokens)
        self.packer.begin(row)

    def lend(self, row: int, pages: Sequence[int], past: int, tokens: int) -> None:
        """Give a row pages that a server deals out, `past` tokens of it in place, for so many tokens in all."""
        self._own[row], self.lengths[row] = list(pages[: self.needed(tokens)]), past
        self.packer.begin(row)

    def write(self, layer: int, k: Any, v: Any, step: Any) -> None:
        """Keep k and v, ttnn [1, kv_heads, T, head_dim], of a pass or of a decode step. See KVCache.

        Args:
            step: PrefillTables or DecodeTables.
        """
        step.write(self.k[layer], self.v[layer], k, v)

    def attend(self, layer: int, q: Any, step: Any, exact: Exact | None = None) -> Any:
        """q, ttnn [1, heads, T, head_dim] -> as q. Arguments as `write`; None: by ttnn's own settings."""
        return step.attend(self.k[layer], self.v[layer], q, exact)

    def tables_of(self, one: Pass) -> PrefillTables:
        """The tables of a pass, on the device."""
        made = []
        for piece in one.pieces:
            written, seen = (tensors.replicate(table, self.device) for table in self.pages_of(piece))
            made.append(PieceTables(piece, written, seen))
        return PrefillTables(made)

    def pages_of(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """int32 pages that a piece is written to [1, size / PAGE], and that it attends to [1, any]."""
        first = piece.past // PAGE
        # page 0 takes the padding of the longest piece
        whole = self._padded(piece.row) + [0] * (power_of_2(self._most) + 1)
        return torch.tensor([whole[first : first + piece.size // PAGE]]).int(), torch.tensor([whole]).int()

    def table(self, rows: Sequence[int]) -> Tensor:
        """int32 [len(rows), capacity / PAGE]: the pages of each row, in order; 0 past them."""
        return torch.tensor([self._padded(row) for row in rows]).int()


class EightBitCache(PagedCache):
    """A PagedCache in bfloat8_b: 17 bytes for 16 values of a token, which share an exponent."""

    form = EIGHT_BITS


CACHES: dict[str, type[PagedCache]] = {cache.form: cache for cache in (PagedCache, EightBitCache)}
"""By format."""
