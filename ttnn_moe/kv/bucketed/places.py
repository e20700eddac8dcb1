"""Where the tokens of each row lie: the tiers of a cache, their pages, tables and counts, on host and device."""

from __future__ import annotations

import torch
from torch import Tensor

from ...cuda.attention.tiers import UNIT, Layers
from ..cache import CacheSizes
from ..pages import PagePool, zeros
from .allocation import Allocation
from .storage import empty_layers


class Places:
    """Tiers of `rows` rows, and one row more for dummy tokens.

    Pages 0 of the tiers are dummy pages. Each row has its own first pages of the high tier; other pages come from a
    pool. The host alone changes tables and counts; `refresh` brings them to the device.

    Args:
        capacity: tokens of a row, whole pages. total: pages of all rows together. page: tokens of a page.

    Attributes:
        tiers: by bits, all layers. layers: of each layer, its tiers.
        units: by row, how many units have left the high tier.
        counts: by bits, [rows + 1] int32 on the device: slots in use.
    """

    def __init__(self, sizes: CacheSizes, allocation: Allocation, rows: int, capacity: int, total: int, page: int):
        self.sizes, self.allocation, self.rows, self.page = sizes, allocation, rows, page
        self.high_pages = allocation.high_slots // page
        self.units = [0] * (rows + 1)
        self.pools = {b: PagePool(allocation.pool(b, rows, total)) for b in allocation.tiers}
        full = allocation.pages_of(capacity)
        self._host_counts: dict[int, Tensor] = {}
        self._make_tables({b: full[b] + self.high_pages * (b == allocation.high) for b in allocation.tiers})
        self.tiers = {b: self._make_tier(b) for b in allocation.tiers}
        self.layers = [[self.tiers[b].each[layer] for b in allocation.tiers] for layer in range(sizes.layers)]
        self._pages: list[dict[int, list[int]]] = [{} for _ in range(rows + 1)]

    def take(self, row: int, pages: dict[int, int]) -> None:
        """Give a row so many pages of each tier, besides its own of the high tier."""
        own = self.allocation
        self.units[row] = 0
        self._pages[row] = {b: self.pools[b].take(n) for b, n in pages.items()}
        for b, taken in self._pages[row].items():
            line, first = self._host_tables[b][row], self.high_pages if b == own.high else 0
            line[first:] = 0
            line[first : first + len(taken)] = torch.tensor(taken, dtype=torch.int32) + self._first_page(b)
        self.count(row)
        # what an earlier request left in the high tier is no token of this one
        self.tiers[own.high].together.scales.unflatten(0, (self.sizes.layers, -1))[:, self.own_pages(row)] = -1.0

    def give(self, row: int) -> None:
        """Give a row's pages back."""
        for b, pages in self._pages[row].items():
            self.pools[b].give(pages)
        self._pages[row] = {}
        for counts in self._host_counts.values():
            counts[row] = 0
        self._stale = True

    def count(self, row: int) -> None:
        """Take in a change of units[row]."""
        own = self.allocation
        for b, n in own.split(self.units[row]).items():
            self._host_counts[b][row] = UNIT * n + (own.high_slots if b == own.high else 0)
        self._stale = True

    def refresh(self) -> None:
        """Bring tables and counts to the device."""
        if self._stale and self._device_words is not self._host:
            host = self._host.pin_memory() if self._device_words.is_cuda else self._host
            self._device_words.copy_(host, non_blocking=self._device_words.is_cuda)
        self._stale = False

    def slot_of(self, position: int) -> int:
        """The slot of a position in its row's high tier."""
        own = self.allocation
        return position if position < own.sinks else own.sinks + (position - own.sinks) % own.ring

    def own_page(self, row: int) -> int:
        """The first page of the high tier that is the row's own; the others follow it."""
        return 1 + row * self.high_pages

    def own_pages(self, row: int) -> Tensor:
        """Pages of the high tier that are the row's own, [n] int64."""
        first = self.own_page(row)
        return torch.arange(first, first + self.high_pages, device=self.sizes.device)

    def pages_at(self, row: int, bits: int, at: list[int]) -> list[int]:
        """The pages at these places of a row's table."""
        line = self._host_tables[bits][row]
        return line[at].tolist()  # type: ignore[no-any-return]

    def _first_page(self, bits: int) -> int:
        """Of a tier, the page before the first of its pool: rows' own pages come before."""
        return self.rows * self.high_pages if bits == self.allocation.high else 0

    def _make_tables(self, widths: dict[int, int]) -> None:
        """Tables and counts of all tiers lie in one buffer, so that one copy brings them to the device."""
        lines, own = self.rows + 1, self.allocation
        lengths = [lines * (width + 1) for width in widths.values()]
        self._host = zeros((sum(lengths),), torch.int32, torch.device("cpu"))
        self._device_words = self._host.to(self.sizes.device)
        self._stale = False
        self._host_tables, self._host_counts = _parts(self._host, lines, widths)
        self._tables, self.counts = _parts(self._device_words, lines, widths)
        high = torch.arange(1, 1 + self.rows * self.high_pages, dtype=torch.int32)
        self._host_tables[own.high][: self.rows, : self.high_pages] = high.view(self.rows, -1)

    def _make_tier(self, bits: int) -> Layers:
        sizes, pages = self.sizes, 1 + self._first_page(bits) + self.pools[bits].n
        tables = self._tables[bits], self.counts[bits]
        return empty_layers(bits, sizes.layers, pages, sizes.kv_heads, sizes.head_dim, *tables, self.page)


def _parts(words: Tensor, lines: int, widths: dict[int, int]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """By tier: tables [lines, width] and counts [lines] of a buffer."""
    tables, counts, done = {}, {}, 0
    for bits, width in widths.items():
        tables[bits] = words[done : done + lines * width].view(lines, width)
        counts[bits] = words[done + lines * width : done + lines * (width + 1)]
        done += lines * (width + 1)
    return tables, counts
