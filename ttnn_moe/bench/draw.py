"""Draws: random routings of T tokens, uniform or skewed, the same on every machine for one seed.

Every expert has a popularity: all the same (uniform), or, skewed, r ** -SKEW for the expert of popularity rank r,
ranks 1 .. E being a random permutation of the experts. A token takes K distinct experts, one after the other. The
probability of each is in proportion to its popularity among those not yet taken: the K largest of log popularity plus
Gumbel noise. With SKEW = 0.5 the busiest of 128 experts gets about five times the mean at K = 8. Routing weights are
uniform in 0.5 .. 1.5, then divided by their sum, so that no expert's share hides below the gate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

SKEW = 0.5


@dataclass(frozen=True)
class Draw:
    """One routing on the CPU: ids [T, K] int32, weights [T, K] fp32, and what it asks of a machine.

    Attributes:
        active: experts with at least one token. most: tokens of the busiest expert. pairs: ids that name an expert.
    """

    ids: Tensor
    weights: Tensor
    active: int
    most: int
    pairs: int

    @classmethod
    def of(cls, ids: Tensor, weights: Tensor, E: int) -> Draw:
        """Describe a routing; ids outside 0 .. E-1 name no expert."""
        valid = ids[(ids >= 0) & (ids < E)]
        counts = torch.bincount(valid.flatten().long(), minlength=E)
        return cls(ids, weights, int((counts > 0).sum()), int(counts.max()), valid.numel())

    @classmethod
    def random(cls, T: int, E: int, K: int, seed: int, skewed: bool = False) -> Draw:
        generator = torch.Generator().manual_seed(seed)
        scores = -torch.rand(T, E, generator=generator).clamp_min(1e-12).log().neg().log()  # Gumbel
        if skewed:
            rank = torch.randperm(E, generator=generator) + 1
            scores -= SKEW * rank.log()
        ids = scores.topk(K).indices.int()
        weights = 0.5 + torch.rand(T, K, generator=generator)
        return cls.of(ids, weights / weights.sum(-1, keepdim=True), E)

    def beside(self, taken: Tensor) -> Draw:
        """The same routing with its experts renamed, in ascending order, to experts that are not taken.

        Args:
            taken: [E] bool; at least `active` are False.
        """
        names = torch.empty(len(taken), dtype=torch.int32)
        names[self.ids.unique().long()] = (~taken).nonzero().flatten()[: self.active].int()
        return replace(self, ids=names[self.ids.long()])
