"""Choosing the next token from logits, reproducibly for each sequence whatever batch it is in."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ttnn_moe.errors import RequestError


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: logits are divided by it; 0 = greedy (the first of the largest logits).
        top_k: keep the k most probable tokens; 0 = all.
        top_p: of what top_k kept, keep the fewest most probable tokens whose probabilities reach top_p.

    Raises:
        RequestError: a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name, good, expected in (
            ("temperature", 0 <= self.temperature < float("inf"), "0 (greedy) or a positive number"),
            ("top_k", self.top_k >= 0, "0 (all) or a positive count"),
            ("top_p", 0 < self.top_p <= 1, "more than 0, at most 1"),
        ):
            if not good:
                raise RequestError(f"{name} is out of range", got=getattr(self, name), expected=expected)


def choose(logits: Tensor, sampling: Sampling, uniform: Tensor | None = None) -> Tensor:
    """One token per row, without a host synchronisation.

    Args:
        logits: [R, V] of any float dtype.
        uniform: [R] fp64 in [0, 1): the only randomness; not needed when greedy.

    Returns:
        [R] int64: the first token, in descending probability, at which the cumulative probability exceeds
        uniform * (probability kept).
    """
    if sampling.temperature == 0 or uniform is None:
        return logits.argmax(-1)
    probabilities, tokens = kept_probabilities(logits, sampling)
    cumulative = probabilities.cumsum(-1)
    # rounding can put the target past the end
    target = (uniform[:, None] * cumulative[:, -1:]).to(cumulative)
    position = torch.searchsorted(cumulative, target, right=True).clamp_(max=tokens.shape[-1] - 1)
    return tokens.gather(-1, position)[:, 0]


def kept_probabilities(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Probabilities [R, n] fp64 in descending order, 0 for those not kept, and their tokens [R, n]."""
    V = logits.shape[-1]
    n = min(sampling.top_k or V, V)
    values, tokens = torch.topk(logits.float() / sampling.temperature, n, dim=-1, sorted=True)
    probabilities = torch.softmax(values.double(), dim=-1)
    if sampling.top_p < 1:
        before = probabilities.cumsum(-1) - probabilities
        probabilities = torch.where(before < sampling.top_p, probabilities, 0)
    return probabilities, tokens


def seeds_of(seed: int | Sequence[int] | None, B: int) -> list[int]:
    """Seeds seed, seed + 1, ... for B sequences; or the B given; or, for None, fresh ones.

    Raises:
        RequestError: not B seeds, or one that is no 64-bit integer.
    """
    if seed is None:
        seed = int.from_bytes(os.urandom(8), "little") >> 2
    seeds = [seed + i for i in range(B)] if isinstance(seed, int) else list(map(operator.index, seed))
    if len(seeds) != B or any(not 0 <= s < 2**63 for s in seeds):
        raise RequestError("bad seeds", got=seed, expected=f"one integer, or {B} of them, each 0 .. 2^63 - 1")
    return seeds
