"""Packed keys and values of one layer, a tier of bits at a time, as the bucketed attention kernels read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

BITS = (2, 3, 4, 8, 16)
"""Bits of a value that a tier may have; 16: bf16."""

UNIT = 32
"""Tokens that are packed together. A page holds whole units, and a tier below 8 bits is written by whole units."""


@dataclass(frozen=True)
class Tier:
    """One layer's tokens of `bits` bits, in pages of P tokens; P is a multiple of UNIT.

    Slot s of a row is slot s % P of its page table[row, s / P]. Slots may hold a row's tokens in any order.

    Attributes:
        bits: one of BITS.
        payload: [pages, kv_heads, 2, P * head_dim * bits / 8] uint8: keys, then values, as `packing.pack` packs units.
        scales: [pages, kv_heads, P / 32, 8, 4, 2] fp16: (key, value) of token 8 i + j of a unit at [j, i]. A negative
            key scale marks a slot that holds no token. 16 bits: 1.
        token_ids: [pages, P] int32, the position of each token in its request.
        table: [rows, pages of a row] int32.
        counts: [rows] int32: slots 0 .. count - 1 of a row are in use. Kernels read them on the device.
    """

    bits: int
    payload: Tensor
    scales: Tensor
    token_ids: Tensor
    table: Tensor
    counts: Tensor

    @property
    def page(self) -> int:
        """Tokens of a page."""
        return self.token_ids.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.payload.shape[1]

    @property
    def head_dim(self) -> int:
        return self.payload.shape[3] * 8 // (self.bits * self.page)

    @property
    def row_stride(self) -> int:
        """Words of the table between rows: more than its width where it is a part of a wider one."""
        return max(self.table.stride(0), self.table.shape[1])

    @property
    def capacity(self) -> int:
        """Slots of a row, at most."""
        return self.table.shape[1] * self.page

    @property
    def k_qx(self) -> Tensor:
        """[pages, kv_heads, P * head_dim * bits / 8] uint8: the packed keys."""
        return self.payload[:, :, 0]

    @property
    def v_qx(self) -> Tensor:
        """As k_qx: the packed values."""
        return self.payload[:, :, 1]

    @property
    def k_scale(self) -> Tensor:
        """[pages, kv_heads, P] fp16, in the order of slots; a copy."""
        return self.scales[..., 0].transpose(-1, -2).flatten(2)

    @property
    def v_scale(self) -> Tensor:
        """As k_scale, of values."""
        return self.scales[..., 1].transpose(-1, -2).flatten(2)


@dataclass(frozen=True)
class Layers:
    """A tier of all layers.

    Attributes:
        each: layer by layer. pages: of a layer.
        together: the same memory as one tier. Its pages are those of layer 0, then those of layer 1, and so on.
    """

    each: list[Tier]
    together: Tier
    pages: int

    @classmethod
    def of(cls, tiers: Sequence[Tier], payload: Tensor, scales: Tensor) -> Layers:
        """The tier whose layers have payload and scales [layers, pages, ...]."""
        whole = replace(tiers[0], payload=payload.flatten(0, 1), scales=scales.flatten(0, 1))
        return cls(list(tiers), whole, payload.shape[1])

    def places(self, layers: range, pages: Tensor) -> Tensor:
        """Pages [n] of these layers, as pages [layers, n] of `together`."""
        first = torch.arange(layers.start, layers.stop, device=pages.device) * self.pages
        return first[:, None] + pages


def by_bits(tiers: Sequence[Tier], size: Callable[[Tier], int]) -> tuple[int, ...]:
    """A number of each tier, in the order of BITS; 0 for a tier that is not there."""
    found = {tier.bits: size(tier) for tier in tiers}
    return tuple(found.get(bits, 0) for bits in BITS)


def addresses(tiers: Sequence[Tier], *fields: str) -> list[int]:
    """Where these tensors of each tier lie, tier by tier in the order of BITS; 0 for a tier that is not there."""
    found = {tier.bits: [getattr(tier, field).data_ptr() for field in fields] for tier in tiers}
    return [address for bits in BITS for address in found.get(bits, [0] * len(fields))]
