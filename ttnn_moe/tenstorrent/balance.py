"""Whether a mesh should hold whole experts (placed), or a part of every expert on each chip (split).

A step ends when its slowest chip has read its experts. With whole experts that is the chip which the routing visits
most; with a part of every expert all chips read the same. All counts are exact for a routing that draws each token's K
experts uniformly.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import comb

FEW = 2.0
"""Visited experts a chip below which `prefer_split` splits. A split expert is D times smaller work for each core, so
that many of them cost more in waiting than the busiest chip costs in bytes."""


@dataclass(frozen=True)
class Visits:
    """Experts that a step of B tokens visits.

    Attributes:
        mean: of one chip's experts, on average: what each chip reads when experts are split, in whole experts' bytes.
        most: expected number on the chip that is visited most: what a step reads when experts are placed.
    """

    mean: float
    most: float


@functools.cache
def visits(E: int, K: int, D: int, B: int) -> Visits:
    """Of E experts on D chips, K a token, B tokens."""
    distinct = _distinct(E, K, B)
    each = E // D
    mean = sum(n * p for n, p in enumerate(distinct)) / D
    # P(most <= m | n visited): ways to draw n with at most m from each chip, of all ways to draw n
    most = 0.0
    for m in range(each):
        row = [comb(each, j) for j in range(m + 1)]
        ways = [1]
        for _ in range(D):
            ways = _product(ways, row)
        most += sum(p * (1 - (ways[n] / comb(E, n) if n < len(ways) else 0.0)) for n, p in enumerate(distinct))
    return Visits(mean, most)


def prefer_split(E: int, K: int, D: int, B: int, I: int) -> bool:
    """Whether steps of B tokens should read a part of every expert on each chip; False where I has no D parts."""
    return D > 1 and I % (32 * D) == 0 and visits(E, K, D, B).mean < FEW


def _distinct(E: int, K: int, B: int) -> list[float]:
    """P(n different experts), n = 0 .. E, of B draws of K different ones."""
    found = [1.0] + [0.0] * E
    for _ in range(B):
        after = [0.0] * (E + 1)
        for n, p in enumerate(found):
            if p:
                for new in range(max(0, K - n), min(K, E - n) + 1):
                    after[n + new] += p * comb(E - n, new) * comb(n, K - new) / comb(E, K)
        found = after
    return found


def _product(a: list[int], b: list[int]) -> list[int]:
    """Of two polynomials, by their coefficients."""
    out = [0] * (len(a) + len(b) - 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            out[i + j] += x * y
    return out
