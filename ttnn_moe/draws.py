"""Tokens drawn from logits: what is asked for each row, and the definition in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .accelerator import upload
from .kv.transfer import to_device

SMALLEST = 1e-37
"""Temperatures below it are it: where logits differ at all, the largest has all of the probability."""


How = tuple[float, int, float]  # temperature, top_k, top_p


@dataclass(frozen=True)
class Draw:
    """One token to draw.

    Attributes:
        row: of the logits.
        uniform: in [0, 1), the only randomness.
        temperature: positive; logits are divided by it.
        top_k: only the k largest logits are kept, of equal ones the lowest tokens; 0: all.
        top_p: of these, the fewest most probable tokens whose probabilities reach it are kept.
    """

    row: int
    uniform: float
    temperature: float
    top_k: int = 0
    top_p: float = 1.0

    @property
    def how(self) -> How:
        """temperature, top_k, top_p."""
        return self.temperature, self.top_k, self.top_p


def draw_alike(tokens: Tensor, draws: Sequence[Draw], chosen: Callable[[Tensor, How, Tensor], Tensor]) -> None:
    """Put the tokens of draws into their rows of tokens [R], those that ask alike together.

    Args:
        chosen: (rows [n] int64, their `how`, uniform [n] fp64) -> their tokens [n] int64.
    """
    parts: dict[How, list[Draw]] = {}
    for one in draws:
        parts.setdefault(one.how, []).append(one)
    for how, same in parts.items():
        rows = to_device([one.row for one in same], tokens.device)
        uniform = upload(torch.tensor([one.uniform for one in same], dtype=torch.float64), tokens.device)
        tokens[rows] = chosen(rows, how, uniform)


def draw_tokens(logits: Tensor, tokens: Tensor, draws: Sequence[Draw]) -> None:
    """See decoder.draw_tokens."""
    draw_alike(tokens, draws, lambda rows, how, uniform: choose(logits[rows], *how, uniform))


def choose(logits: Tensor, temperature: float, top_k: int, top_p: float, uniform: Tensor) -> Tensor:
    """[R] int64 tokens of logits [R, V]. uniform: [R] fp64. Other arguments as Draw.

    It is the first token, in descending probability, of equal ones the lowest first, at which the cumulative
    probability exceeds uniform * (probability kept).
    """
    probabilities, tokens = kept_probabilities(logits, temperature, top_k, top_p)
    cumulative = probabilities.cumsum(-1)
    # rounding can put the target past the end
    target = (uniform[:, None] * cumulative[:, -1:]).to(cumulative)
    position = torch.searchsorted(cumulative, target, right=True).clamp_(max=tokens.shape[-1] - 1)
    return tokens.gather(-1, position)[:, 0]


def kept_probabilities(logits: Tensor, temperature: float, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Probabilities [R, n] fp64 in descending order, 0 for those not kept, and their tokens [R, n]."""
    V = logits.shape[-1]
    values, tokens = _largest(logits.float(), min(top_k or V, V))
    first = values[:, :1]
    # the largest is 0 now, so that no temperature makes it infinite; the divisor is no subnormal, nor its inverse
    below = torch.where(values == first, 0, values - first) / min(max(temperature, SMALLEST), 1 / SMALLEST)
    probabilities = torch.softmax(below, dim=-1, dtype=torch.float64)
    if top_p < 1:
        before = probabilities.cumsum(-1) - probabilities
        probabilities = torch.where(before < top_p, probabilities, 0)
    return probabilities, tokens


def _largest(logits: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The n largest of each row of logits [R, V] fp32, descending, of equal ones the lowest token first."""
    V = logits.shape[-1]
    if n == V:
        values, tokens = torch.sort(logits, dim=-1, descending=True, stable=True)
        return values, tokens
    # topk orders equal ones as it likes: none are equal with their tokens
    bits = (logits + 0).view(torch.int32)  # -0 is 0
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32
    keys |= torch.arange(V - 1, -1, -1, device=logits.device)
    tokens = V - 1 - (torch.topk(keys, n, dim=-1).values & 0xFFFFFFFF)
    return logits.gather(-1, tokens), tokens
