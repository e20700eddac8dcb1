"""Tokens that move from the high tier, or from a step that staged them, to the low tiers, in torch. No host wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...cuda.attention.bucketed_write import Change, Ring, Staged
from ...cuda.attention.tiers import UNIT, Layers
from ..transfer import to_device
from .quantise import rotate
from .storage import put_tokens, read_units, write_units

MOST = 1 << 23
"""Numbers of keys that are quantised at a time."""


def move(high: Layers, tiers: Sequence[Layers], ring: Ring, changes: Sequence[Change], staged: Staged | None) -> None:
    """Move tokens of rows to low tiers, then put staged ones into the high tier: the definition of bucketed_write.move.

    Args:
        tiers: all of them. ring: of any layer. staged: the tokens of a step. None: no change has any.
    """
    for change in changes:
        _move_row(high, {layers.together.bits: layers for layers in tiers}, ring, change, staged)


def _move_row(high: Layers, tiers: dict[int, Layers], ring: Ring, change: Change, staged: Staged | None) -> None:
    tier, device = high.together, high.together.payload.device
    page, n = tier.page, UNIT * len(change.places)
    old = max(0, min(n, change.past - change.first))  # they leave the high tier; others are staged
    order = torch.arange(n, device=device) if change.order is None else change.order
    slots = ring.slots_of(torch.arange(change.first, change.first + old, device=device))
    own = change.page + torch.arange((ring.sinks + ring.ring) // page, device=device)
    stay = to_device(change.stay, device)
    size = tier.kv_heads * tier.head_dim * max(n, len(change.stay), 1)
    at_once = max(1, MOST // size)
    for start in range(0, len(high.each), at_once):
        layers = range(start, min(start + at_once, len(high.each)))
        parts: list[tuple[Tensor, Tensor]] = []
        if old:
            k, v = read_high(high, layers, own)
            parts.append((k[:, slots], v[:, slots]))
            of, t = slots % page // UNIT, slots % UNIT
            tier.scales[high.places(layers, own[slots // page]), :, of, t % 8, t // 8, 0] = -1.0
        if old < n:
            first = change.first + old + change.staged
            parts.append(_turned(staged, layers, slice(first, first + n - old)))
        if parts:
            k, v = (torch.cat(xs, 1)[:, order] for xs in zip(*parts, strict=True))
            for bits in {bits for bits, _, _ in change.places}:
                into, which = tiers[bits], [i for i, place in enumerate(change.places) if place[0] == bits]
                pages, units = to_device([list(change.places[i][1:]) for i in which], device).T
                at = into.places(layers, pages) * (into.together.page // UNIT) + units
                mine = [x.unflatten(1, (-1, UNIT))[:, which].flatten(0, 1) for x in (k, v)]
                write_units(into.together, at.flatten(), mine[0], mine[1])
        if change.stay:
            into_slots = ring.slots_of(stay)
            k, v = (x.flatten(0, 1) for x in _turned(staged, layers, stay + change.staged))
            places = high.places(layers, own[into_slots // page]).flatten()
            put_tokens(tier, places, (into_slots % page).repeat(len(layers)), k, v)
    positions = (change.first + order).int().view(-1, UNIT)
    for i, (bits, at_page, unit) in enumerate(change.places):
        tiers[bits].together.token_ids[at_page, unit * UNIT : (unit + 1) * UNIT] = positions[i]
    if change.stay:
        into_slots = ring.slots_of(stay)
        tier.token_ids[own[into_slots // page], into_slots % page] = stay.int()


def _turned(staged: Staged | None, layers: range, tokens: Tensor | slice) -> tuple[Tensor, Tensor]:
    """Keys and values fp32 of some layers and staged tokens, as tiers hold them."""
    assert staged is not None
    span = slice(layers.start, layers.stop)
    k = staged.k[span][:, tokens].float() / staged.key_scale[span, None]
    return rotate(k), rotate(staged.v[span][:, tokens].float())


def read_high(high: Layers, layers: range, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values fp32 [layers, slots, kv_heads, D] of a row's own pages of the high tier; 0 without a token."""
    per_page = high.together.page // UNIT
    units = (high.places(layers, pages)[..., None] * per_page + torch.arange(per_page, device=pages.device)).flatten(1)
    k, v, _ = read_units(high.together, units.flatten())
    k, v = (x.unflatten(0, (len(layers), -1)).flatten(1, 2) for x in (k, v))
    return k, v
