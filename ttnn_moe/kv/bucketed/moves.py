"""Tokens that move from the high tier, or from a step that staged them, to the low tiers. No host wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...cuda.attention.tiers import UNIT, Tier
from .quantise import rotate
from .storage import put_tokens, read_units, write_units

MOST = 1 << 23
"""Numbers of keys that are quantised at a time."""


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

    def places(self, layers: range, pages: Tensor) -> Tensor:
        """Pages [n] of these layers, as pages [layers, n] of `together`."""
        first = torch.arange(layers.start, layers.stop, device=pages.device) * self.pages
        return first[:, None] + pages


@dataclass(frozen=True)
class Target:
    """Units of one tier that tokens move to: their pages, and the unit of each page."""

    layers: Layers
    pages: Tensor
    units: Tensor


@dataclass(frozen=True)
class Staged:
    """Keys and values of a step's tokens of one row: [layers, n, kv_heads, D], as they were written.

    Attributes:
        key_scale: [layers, 1, D] fp32, what keys are divided by before they are rotated.
    """

    k: Tensor
    v: Tensor
    key_scale: Tensor

    def turned(self, layers: slice, tokens: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Keys and values fp32 of some layers and tokens, as tiers hold them."""
        k = self.k[layers, tokens].float() / self.key_scale[layers, None]
        return rotate(k), rotate(self.v[layers, tokens].float())


def move(
    high: Layers,
    slots: Tensor,
    pages: Tensor,
    staged: Staged | None,
    leaving: range,
    targets: Sequence[Target],
    mass: Tensor | None,
    positions: Tensor,
    stay: tuple[Tensor, Tensor] | None,
) -> None:
    """Move a row's oldest tokens to low tiers, and put the newest of a step into the high tier.

    Args:
        high: the high tier. slots: [r] int64, slots of the row that leave it, oldest first. pages: [s] int64, pages of
            the row's own part of it.
        staged: tokens of a step. leaving: those of them that go to low tiers.
        targets: by tier, most bits first; they hold r + leaving tokens, those of most mass first.
        mass: [r + leaving] fp32, what later queries gave each of them. None: in the order of their positions.
        positions: [r + leaving] int32, of each token.
        stay: (slots of the row, indices within staged) [n] int64 of tokens for the high tier. None: none.
    """
    count = len(slots) + len(leaving)
    if mass is not None and len(targets) > 1:
        order = torch.sort(mass, descending=True, stable=True).indices
    else:
        order = torch.arange(count, device=pages.device)
    size = high.together.kv_heads * high.together.head_dim * max(count, 1)
    at_once = max(1, MOST // size)
    for first in range(0, len(high.each), at_once):
        layers = range(first, min(first + at_once, len(high.each)))
        _move(high, layers, slots, pages, staged, leaving, targets, order, stay)
    done = 0
    for target in targets:
        n = len(target.pages) * UNIT
        ids = target.layers.together.token_ids.unflatten(1, (-1, UNIT))
        ids[target.pages, target.units] = positions[order[done : done + n]].view(-1, UNIT)
        done += n


def _move(
    high: Layers,
    layers: range,
    slots: Tensor,
    pages: Tensor,
    staged: Staged | None,
    leaving: range,
    targets: Sequence[Target],
    order: Tensor,
    stay: tuple[Tensor, Tensor] | None,
) -> None:
    tier, page = high.together, high.together.page
    span = slice(layers.start, layers.stop)
    parts: list[tuple[Tensor, Tensor]] = []
    if len(slots):
        k, v = read_high(high, layers, pages)
        parts.append((k[:, slots], v[:, slots]))
        of, t = slots % page // UNIT, slots % UNIT
        tier.scales[high.places(layers, pages[slots // page]), :, of, t % 8, t // 8, 0] = -1.0
    if staged is not None and leaving:
        own = slice(leaving.start, leaving.stop)
        parts.append(staged.turned(span, own))
    if parts:
        k, v = (torch.cat(xs, 1)[:, order] for xs in zip(*parts, strict=True))
        done = 0
        for target in targets:
            n = len(target.pages) * UNIT
            units = target.layers.places(layers, target.pages) * (target.layers.together.page // UNIT) + target.units
            mine = [x[:, done : done + n].unflatten(1, (-1, UNIT)).flatten(0, 1) for x in (k, v)]
            write_units(target.layers.together, units.flatten(), mine[0], mine[1])
            done += n
    if stay is not None and staged is not None:
        into, of = stay
        k, v = (x.flatten(0, 1) for x in staged.turned(span, of))
        places = high.places(layers, pages[into // page]).flatten()
        put_tokens(tier, places, (into % page).repeat(len(layers)), k, v)


def read_high(high: Layers, layers: range, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values fp32 [layers, slots, kv_heads, D] of a row's own pages of the high tier; 0 without a token."""
    per_page = high.together.page // UNIT
    units = (high.places(layers, pages)[..., None] * per_page + torch.arange(per_page, device=pages.device)).flatten(1)
    k, v, _ = read_units(high.together, units.flatten())
    k, v = (x.unflatten(0, (len(layers), -1)).flatten(1, 2) for x in (k, v))
    return k, v


def one_tier(tiers: Sequence[Tier], payload: Tensor, scales: Tensor) -> Layers:
    """The tier whose layers have payload and scales [layers, pages, ...]."""
    return Layers(
        list(tiers), replace(tiers[0], payload=payload.flatten(0, 1), scales=scales.flatten(0, 1)), payload.shape[1]
    )
