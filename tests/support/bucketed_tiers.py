"""Rows of a bucketed KV cache with known tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ttnn_moe.cuda.attention.tiers import UNIT, Tier
from ttnn_moe.kv.bucketed.storage import empty_layers, read_units, write_units

DISTORTION = {2: 0.136, 3: 0.0395, 4: 0.0122, 8: 6e-5, 16: 3e-6}
"""Mean squared error of a quantised Gaussian of variance 1, at most, with the scale that keeps its projection; 8 bits
reach to the largest element, 16 round."""


@dataclass
class Rows:
    """Tiers of one layer.

    Attributes:
        lengths: [rows] tokens of each row in all tiers.
        given: of each row, keys and values [tokens, kv_heads, D] fp32 as they were before they were quantised.
    """

    tiers: list[Tier]
    lengths: Tensor
    given: list[tuple[Tensor, Tensor]]

    def dense(self, row: int) -> tuple[Tensor, Tensor]:
        """Keys and values [tokens, kv_heads, D] fp32 of a row as the tiers hold them, by position."""
        found: list[tuple[int, Tensor, Tensor]] = []
        for tier in self.tiers:
            of = tier.page // UNIT
            for slot in range(int(tier.counts[row])):
                page, at = int(tier.table[row, slot // tier.page]), slot % tier.page
                k, v, held = read_units(tier, torch.tensor([page * of + at // UNIT], device=tier.table.device))
                if held[0, at % UNIT]:
                    found.append((int(tier.token_ids[page, at]), k[0, at % UNIT], v[0, at % UNIT]))
        found.sort(key=lambda token: token[0])
        return torch.stack([k for _, k, _ in found]), torch.stack([v for _, _, v in found])


def filled(
    counts: dict[int, list[int]],
    kv_heads: int,
    D: int,
    page: int = 64,
    nan: tuple[int, int] | None = None,
    holes: float = 0.0,
    device: str | torch.device = "cpu",
    outside: float = 0.0,
    spread: float = 1.0,
) -> Rows:
    """Random tokens: slots of each row, by bits. Pages of all rows are mixed; the last tiers hold the newest tokens.

    Args:
        nan: (row, slot of its first tier): a token of NaN.
        holes: the part of the slots that holds no token.
        outside: what slots that are not in use hold, such as NaN.
        spread: of the keys: larger ones make attention choose fewer tokens.
    """
    lengths = torch.zeros(len(next(iter(counts.values()))), dtype=torch.int64)
    given: list[list[tuple[Tensor, Tensor]]] = [[] for _ in lengths]
    tiers = []
    for bits, slots in counts.items():
        many = [-(-n // page) for n in slots]
        order = (1 + torch.randperm(sum(many))).tolist()
        table = torch.zeros(len(slots), max(1, *many), dtype=torch.int32)
        held_slots = torch.tensor(slots, dtype=torch.int32)
        (tier,) = empty_layers(bits, 1, 1 + sum(many), kv_heads, D, table, held_slots, page).each
        tier.scales.fill_(outside)
        if bits == 16:
            tier.payload.view(torch.bfloat16).fill_(outside)
        for row, n in enumerate(slots):
            pages = torch.tensor([order.pop() for _ in range(many[row])], dtype=torch.int64)
            table[row, : len(pages)] = pages
            k, v = torch.randn(2, len(pages) * page, kv_heads, D)
            k, v = k * spread, v + 0.5
            held = (torch.arange(len(k)) < n) & (torch.rand(len(k)) >= holes)
            held |= torch.arange(len(k)) == n - 1  # the newest token
            ids = torch.where(held, lengths[row] + held.long().cumsum(0) - 1, -1).int()
            lengths[row] += int(held.sum())
            given[row].append((k[held].to(device), v[held].to(device)))
            k[n:] = v[n:] = outside
            if nan is not None and row == nan[0] and bits == next(iter(counts)):
                k[nan[1]] = float("nan")
            if n:
                tier.token_ids[pages] = ids.view(-1, page)
                units = (pages[:, None] * (page // UNIT) + torch.arange(page // UNIT)).flatten()
                cut = (k.unflatten(0, (-1, UNIT)), v.unflatten(0, (-1, UNIT)))
                write_units(tier, units, *cut, (held | (torch.arange(len(k)) >= n)).view(-1, UNIT))
        fields = (tier.payload, tier.scales, tier.token_ids, tier.table, tier.counts)
        tiers.append(Tier(bits, *(x.to(device) for x in fields)))
    tokens = [tuple(torch.cat(parts) for parts in zip(*of_row, strict=True)) for of_row in given]
    return Rows(tiers, lengths.to(device), tokens)  # type: ignore[arg-type]


def lost(got: Tensor, q: Tensor, rows: Rows) -> float:
    """||got - want|| / ||want - 0.5|| of attention of q [rows, 1, heads, D] to the tokens as they were: values are 0.5
    on average, which no quantiser loses."""
    wants = []
    for x, (k, v) in zip(q.float(), rows.given, strict=True):
        heads = (one.transpose(0, 1) for one in (x, k, v))
        wants.append(F.scaled_dot_product_attention(*heads, enable_gqa=True).transpose(0, 1))
    want = torch.stack(wants)
    return float((got.float() - want).norm() / (want - 0.5).norm())


def bound_of(bits: int) -> float:
    """Of lost, where keys, values and queries are Gaussians of variance 1.

    e, the relative error of a vector, is the root of its distortion. Errors of values move the output by e. Errors of
    keys move each score by e times a Gaussian of variance 1, so weights and output by e as well. Both together:
    sqrt(2) e. Twice e leaves room, and is less than what a bit less loses.
    """
    return 2.0 * DISTORTION[bits] ** 0.5  # type: ignore[no-any-return]
