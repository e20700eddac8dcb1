"""Random routings with their sorted view by torch's stable sort, and the padded view by hand."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draw:
    """A routing on the host.

    Attributes:
        ids: [T, K], some out of range. local: [E] int32, which of the experts are here, as number -1 or below `here`;
            None: all. bound: tokens that count; None: all.
        order: pairs in the order of their rows. inverse: [T * K] the row of each pair, or -1. counts: rows of each of
            the experts that are here.
    """

    ids: Tensor
    local: Tensor | None
    here: int
    bound: int | None
    order: Tensor
    inverse: Tensor
    counts: list[int]


def draw(seed: int, rng: random.Random, T: int, E: int, K: int) -> Draw:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(-2, E + 2, (T, K), generator=g)
    if rng.random() < 0.3:
        ids[torch.rand(T, K, generator=g) < 0.8] = rng.randrange(E)
    ids = ids.int() if rng.random() < 0.5 else ids
    local, here = None, E
    if rng.random() < 0.5:
        here = (E + 1) // 2
        shuffled = torch.randperm(E, generator=g)
        local = torch.where(shuffled < here, shuffled, -1).int()
    bound = rng.randrange(T + 1) if rng.random() < 0.3 else None

    expert = torch.where((ids >= 0) & (ids < E), ids, -1).long()
    if local is not None:
        expert = torch.where(expert >= 0, local.long()[expert.clamp_min(0)], -1)
    if bound is not None:
        expert[bound:] = -1
    flat = expert.flatten()
    order = torch.argsort(torch.where(flat < 0, here, flat), stable=True)[: int((flat >= 0).sum())]
    inverse = torch.full_like(flat, -1)
    inverse[order] = torch.arange(len(order))
    counts = torch.bincount(flat[flat >= 0], minlength=here).tolist()
    return Draw(ids, local, here, bound, order, inverse, counts)


def padded_by_hand(ids: Tensor, weights: Tensor, E: int) -> list[list[tuple[int, float]]]:
    """For each expert, (token, weight) of each token routed to it; duplicates of a token summed in fp32."""
    rows: list[list[tuple[int, float]]] = [[] for _ in range(E)]
    for t in range(ids.shape[0]):
        for k in range(ids.shape[1]):
            e = int(ids[t, k])
            if not 0 <= e < E:
                continue
            if rows[e] and rows[e][-1][0] == t:
                rows[e][-1] = (t, float(torch.tensor(rows[e][-1][1]) + weights[t, k]))
            else:
                rows[e].append((t, float(weights[t, k])))
    return rows
