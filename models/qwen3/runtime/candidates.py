"""Tokens drawn from the largest logits of each row, while the other logits stay on the model's device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ttnn_moe.draws import Draw, draw_alike

from .sampling import Sampling, choose

TEMPERATURES = 1e-2, 1e4
"""A device adds up exponentials at temperatures in this range."""


@dataclass(frozen=True)
class Candidates:
    """The n largest logits of each of R rows.

    Attributes:
        values: [R, n] fp32, descending; -inf: no token. tokens: [R, n] int64.
        first: [R] int64, the first of the largest logits of each row: what greedy requests take.
        mass: [R] fp64, the sum over all V logits of exp((logit - values[:, 0]) / temperature of the row); NaN: unknown.
        whole: gives all logits [R, V]; slow.
    """

    values: Tensor
    tokens: Tensor
    first: Tensor
    mass: Tensor
    whole: Callable[[], Tensor]

    @property
    def device(self) -> torch.device:
        return self.values.device

    def __getitem__(self, rows: Tensor) -> Candidates:
        """Of these rows."""
        values, tokens, first, mass = (part[rows] for part in (self.values, self.tokens, self.first, self.mass))
        return Candidates(values, tokens, first, mass, lambda: self.whole()[rows])

    @classmethod
    def joined(cls, parts: Sequence[Candidates]) -> Candidates:
        """The rows of all parts, at least one, in order."""
        fields = [(part.values, part.tokens, part.first, part.mass) for part in parts]
        values, tokens, first, mass = (torch.cat(same) for same in zip(*fields, strict=True))
        return cls(values, tokens, first, mass, cache(lambda: torch.cat([part.whole() for part in parts])))


def needs_mass(sampling: Sampling) -> bool:
    """Whether a draw needs Candidates.mass."""
    return sampling.temperature > 0 and sampling.top_k == 0


def draw_among(found: Candidates, tokens: Tensor, draws: Sequence[Draw]) -> None:
    """As decoder.draw_tokens of the whole logits."""
    draw_alike(tokens, draws, lambda rows, how, uniform: choose_among(found[rows], Sampling(*how), uniform))


def choose_among(found: Candidates, sampling: Sampling, uniform: Tensor) -> Tensor:
    """As `choose` of the whole logits. It asks for these only where the candidates do not decide.

    Args:
        uniform: [R] fp64 in [0, 1).
    """
    n = found.values.shape[1]
    if 0 < sampling.top_k <= n:
        return found.tokens.gather(1, choose(found.values, sampling, uniform)[:, None])[:, 0]
    chosen, sure = _of_all(found, sampling, uniform)
    if not bool(sure.all()):
        chosen[~sure] = choose(found.whole()[~sure], sampling, uniform[~sure])
    return chosen


def _of_all(found: Candidates, sampling: Sampling, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [R] drawn from all V, and whether the candidates decide them."""
    low, high = TEMPERATURES
    if sampling.top_k or not low <= sampling.temperature <= high:
        return found.first.clone(), torch.zeros_like(found.first, dtype=torch.bool)
    above = (found.values - found.values[:, :1]).double() / sampling.temperature
    probabilities = above.exp() / found.mass[:, None]
    cumulative = probabilities.cumsum(1)
    last, target = cumulative[:, -1], uniform
    sure = last > target
    if sampling.top_p < 1:
        kept = cumulative - probabilities < sampling.top_p
        sure = last >= sampling.top_p
        target = uniform * torch.where(kept, probabilities, 0).sum(1)
    at = torch.searchsorted(cumulative, target[:, None], right=True).clamp_(max=cumulative.shape[1] - 1)
    return found.tokens.gather(1, at)[:, 0], sure
