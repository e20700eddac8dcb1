"""What leaves the high tier of a row after a step: of the tokens of a prompt, which go where."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...cuda.attention.bucketed_unpack import Room
from ...cuda.attention.bucketed_write import Change
from ...cuda.attention.tiers import UNIT
from ..step import Span
from ..transfer import to_device
from .places import Places


@dataclass
class Piece:
    """A span of a prompt whose keys and values are staged.

    Attributes:
        at: [n] int64: 0 .. n - 1. which: number among the pieces that have a past; -1: it has none.
        mass: [high slots + n] fp32, what its observing queries gave to the tokens of the high tier and to its own.
            None: no choice depends on it.
        high: [layers, high slots, kv_heads, D] fp32, the keys of the high tier, as queries meet them. None: no mass,
            or no past.
        room: where its row becomes bf16. None: it does not.
        number: of a captured step, the prompt's number there: see CapturedPrompts.mass.
    """

    span: Span
    at: Tensor
    which: int
    mass: Tensor | None
    high: Tensor | None
    room: Room | None
    number: int | None = None


def empty_mass(places: Places, span: Span) -> Tensor | None:
    """Zeros for the mass of a span's tokens, where their tiers depend on it."""
    own, units = places.allocation, places.units[span.row]
    before, after = own.split(units), own.split(units + own.due(span.past + span.n, units))
    if sum(after[b] > before[b] for b in after) < 2:
        return None
    return torch.zeros(own.high_slots + span.n, device=places.sizes.device)


def change(places: Places, row: int, tokens: int, piece: Piece | None) -> Change:
    """What is due in a row of so many tokens, the last of them those of `piece`. The row's units grow by it."""
    own, units = places.allocation, places.units[row]
    n = own.due(tokens, units)
    past = tokens if piece is None else piece.span.past
    first = own.sinks + UNIT * units
    end = first + UNIT * n
    order = None
    if piece is not None and piece.mass is not None and n:
        ring = [places.slot_of(p) for p in range(first, min(end, past))]
        mass = piece.mass[own.high_slots :][max(first - past, 0) : max(end - past, 0)]
        mass = torch.cat((piece.mass[to_device(ring, mass.device)], mass))
        order = torch.sort(mass, descending=True, stable=True).indices
    stay = [] if piece is None else [p for p in range(past, tokens) if not first <= p < end]
    index = 0 if piece is None else piece.span.first - past
    targets = _targets(places, row, units, n)
    places.units[row] += n
    places.count(row)
    return Change(places.own_page(row), first, targets, past, index, order, stay)


def _targets(places: Places, row: int, units: int, n: int) -> list[tuple[int, int, int]]:
    """Where the next n units of a row go: bits, page, unit of the page. The tier of most bits comes first."""
    own, per = places.allocation, places.page // UNIT
    before, after = own.split(units), own.split(units + n)
    out = []
    for b in sorted(own.tiers, reverse=True):
        first = own.high_slots // UNIT if b == own.high else 0
        at = range(first + before[b], first + after[b])
        pages = places.pages_at(row, b, [i // per for i in at])
        out += [(b, page, i % per) for page, i in zip(pages, at, strict=True)]
    return out
