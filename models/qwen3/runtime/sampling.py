"""Choosing the next token from logits, reproducibly for each sequence whatever batch it is in."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ttnn_moe import draws
from ttnn_moe.arguments import LARGEST, as_integer, integer, number
from ttnn_moe.errors import RequestError
from ttnn_moe.visible import shown

NAN = -1
"""What the host reads instead of a token where logits are NaN."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: logits are divided by it; 0 = greedy (the first of the largest logits).
        top_k: keep the k most probable tokens; 0 = all.
        top_p: of what top_k kept, keep the fewest most probable tokens whose probabilities reach top_p.

    Each may be any real number, or top_k any integer, of Python, numpy or torch; a bool is none.

    Raises:
        RequestError: a value of another type, not finite, or out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        checked = {
            "temperature": number("temperature", self.temperature, 0, math.inf, "0 (greedy) or a positive number"),
            "top_k": integer("top_k", self.top_k, 0, expected="an integer, 0 (all) or a positive count"),
            "top_p": number("top_p", self.top_p, 0, 1, "more than 0, at most 1", above=True),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def choose(logits: Tensor, sampling: Sampling, uniform: Tensor | None = None) -> Tensor:
    """One token per row, without a host synchronisation.

    Args:
        logits: [R, V] of any float dtype.
        uniform: [R] fp64 in [0, 1): the only randomness; not needed when greedy.

    Returns:
        [R] int64: see decoder.draw_tokens.
    """
    if sampling.temperature == 0 or uniform is None:
        return logits.argmax(-1)
    return draws.choose(logits, sampling.temperature, sampling.top_k, sampling.top_p, uniform)


def greedy(logits: Tensor, tokens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The first of the largest logits of each row, [R] int64; and whether a logit of the row is NaN, [R] bool.

    Args:
        logits: [R, V] of any float dtype. tokens: where to write them; default: a new tensor.
    """
    tokens = torch.argmax(logits, -1, out=tokens)  # not torch.max: see docs/notes/qwen3.md
    # where a logit is NaN, so is the largest
    return tokens, logits.gather(-1, tokens[:, None])[:, 0].isnan()


def marked(tokens: Tensor, nan: Tensor) -> Tensor:
    """The tokens as the host reads them: NAN where the logits are NaN. A step feeds `tokens`: each is an id."""
    return tokens.masked_fill(nan, NAN)


def fresh_seed() -> int:
    """A seed that nobody had."""
    return int.from_bytes(os.urandom(8), "little") >> 2


def seeds_of(seed: int | Sequence[int] | None, B: int, fresh: Callable[[], int] = fresh_seed) -> list[int]:
    """Seeds seed, seed + 1, ... for B sequences; or the B given; or, for None, from a fresh one on.

    Raises:
        RequestError: not B seeds, or one that is no 64-bit integer.
    """
    if seed is None:
        seed = fresh()
    first = as_integer(seed)
    seeds = _listed(seed, B) if first is None else [first + i for i in range(B)]
    if len(seeds) != B or any(s is None or not 0 <= s <= LARGEST for s in seeds):
        raise RequestError(
            "bad seeds",
            got=f"seed={shown(seed)}",
            expected=f"one integer, 0 .. 2^63 - {max(B, 1)}, or {B} of them, each 0 .. 2^63 - 1",
            remedy="give one such integer, or leave seed out for fresh ones",
        )
    return [s for s in seeds if s is not None]


def _listed(seeds: Any, B: int) -> list[int | None]:
    """Items of what should be B integers; None: it is none. A list of another length: they are not B."""
    if isinstance(seeds, (str, Mapping, Set)):
        return [None]
    try:
        return [as_integer(one) for one in islice(seeds, B + 1)]
    except Exception:  # not iterable
        return [None]
