"""A tier's tensors: how large they are, how units of tokens get into them and out again. Plain torch, no host wait."""

from __future__ import annotations

import torch
from torch import Tensor

from ...cuda.attention.tiers import UNIT, Layers, Tier
from ...errors import ContractError
from ..pages import zeros
from .packing import pack, unpack
from .quantise import dequantise, quantise

PAGE = 64
"""Tokens of a page."""


def empty_layers(
    bits: int, layers: int, pages: int, kv_heads: int, head_dim: int, table: Tensor, counts: Tensor, page: int = PAGE
) -> Layers:
    """A tier of all layers, zeros on the device of `table`. Layers share table, counts and token_ids, which are -1.

    Args:
        pages: of a layer. table: [rows, pages of a row] int32. counts: [rows] int32.

    Raises:
        RequestError: the machine has less memory.
    """
    device, lead = table.device, (layers, pages, kv_heads)
    payload = zeros((*lead, 2, page * head_dim * bits // 8), torch.uint8, device)
    scales = zeros((*lead, page // UNIT, 8, 4, 2), torch.float16, device)
    ids = torch.full((pages, page), -1, dtype=torch.int32, device=device)
    return Layers.of([Tier(bits, payload[i], scales[i], ids, table, counts) for i in range(layers)], payload, scales)


def bytes_of_token(bits: int, kv_heads: int, head_dim: int) -> int:
    """Bytes of a token in one layer: packed keys and values, and their scales."""
    return kv_heads * (2 * head_dim * bits // 8 + 4)


def write_units(tier: Tier, units: Tensor, k: Tensor, v: Tensor, held: Tensor | None = None) -> None:
    """Quantise 32 tokens each and write them over whole units. token_ids stay as they are.

    Args:
        units: [n] int64, page * (P / 32) + unit of the page; distinct.
        k, v: [n, 32, kv_heads, D], rotated or not, of any floating dtype.
        held: [n, 32] bool: whether a slot holds a token. None: all do.
    """
    at, of = units // (tier.page // UNIT), units % (tier.page // UNIT)
    for which, x in enumerate((k, v)):
        x = x.transpose(1, 2)
        if held is not None:
            x = torch.where(held[:, None, :, None], x, 0.0)
        levels, scale = quantise(x, tier.bits)
        if which == 0 and held is not None:
            scale = torch.where(held[:, None], scale, -1.0).half()
        packed = pack(levels, tier.bits, values=which == 1)
        payload = tier.payload.unflatten(3, (tier.page // UNIT, -1))
        payload[at, :, which, of] = packed
        tier.scales[at, :, of, :, :, which] = scale.unflatten(-1, (4, 8)).transpose(-1, -2)


def read_units(tier: Tier, units: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of units, dequantised: k, v fp32 [n, 32, kv_heads, D]; held [n, 32] bool.

    A slot without a token reads as 0.
    """
    at, of = units // (tier.page // UNIT), units % (tier.page // UNIT)
    payload = tier.payload.unflatten(3, (tier.page // UNIT, -1))
    scales = tier.scales[at, :, of].transpose(2, 3).flatten(2, 3)  # [n, kv_heads, 32, 2]
    held = ~(scales[:, :, :, 0] < 0)
    found = []
    for which in range(2):
        levels = unpack(payload[at, :, which, of], tier.bits, tier.head_dim, values=which == 1)
        x = dequantise(levels, scales[..., which], tier.bits)
        if tier.bits == 16:
            x = x * scales[..., which, None].float()
        found.append(torch.where(held[..., None], x, 0.0).transpose(1, 2))
    return found[0], found[1], held[:, 0]


def put_tokens(tier: Tier, pages: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Quantise single tokens and write them. For tiers of 8 and 16 bits, whose levels have bytes of their own.

    Args:
        pages, slots: [n] int64, the page of the pool and the slot of the page of each token; distinct.
        k, v: [n, kv_heads, D].

    Raises:
        ContractError: a tier below 8 bits.
    """
    if tier.bits < 8:
        raise ContractError(
            "single tokens do not fit a tier whose bytes they share",
            got=f"{tier.bits} bits",
            expected="8 or 16 bits",
            remedy="write whole units with write_units",
        )
    D, wide = tier.head_dim, tier.bits // 8
    t, of = slots % UNIT, slots // UNIT
    bytes_of_unit = UNIT * D * wide
    for which, x in enumerate((k, v)):
        levels, scale = quantise(x, tier.bits)
        at = _byte_of(D, wide, which == 1, x.device)[t] + (of * bytes_of_unit)[:, None]  # [n, D]
        payload = tier.payload[:, :, which]
        low = (levels & 0xFF).to(torch.uint8)
        heads = torch.arange(tier.kv_heads, device=x.device)[None, :, None]
        payload[pages[:, None, None], heads, at[:, None]] = low
        if wide == 2:
            payload[pages[:, None, None], heads, at[:, None] + 1] = (levels >> 8).to(torch.uint8)
        tier.scales[pages, :, of, t % 8, t // 8, which] = scale


_BYTES: dict[tuple[int, int, bool, torch.device], Tensor] = {}


def _byte_of(D: int, wide: int, values: bool, device: torch.device) -> Tensor:
    """[32, D] int64: the first byte of a level of 1 or 2 bytes within its unit."""
    key = (D, wide, values, device)
    if key not in _BYTES:
        bits = 8 * wide
        order = torch.arange(UNIT * D).reshape(UNIT, D)
        # numbers of 16 bits: two passes find the place of a number's low and high byte
        found = torch.empty(UNIT * D, dtype=torch.int64)
        places = torch.arange(UNIT * D)
        if wide == 2:
            unpacked = pack(order, 16, values).view(torch.int16).to(torch.int64) & 0xFFFF
            found[unpacked] = 2 * places
        else:
            low = pack(order & 0xFF, bits, values).to(torch.int64)
            high = pack(order >> 8, bits, values).to(torch.int64)
            found[low | high << 8] = places
        _BYTES[key] = found.reshape(UNIT, D).to(device)
    return _BYTES[key]
