"""The KV cache, which owns attention: the model hands it q, k and v and gets the attended values back.

A step's tokens stand packed, one after the other, whatever sequence they belong to: no padding exists, so
none can be attended to or routed to an expert. Only this file knows which token belongs to which sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ttnn_moe.errors import RequestError

from .config import Qwen3MoeConfig


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one sequence in a packed step.

    Attributes:
        row: cache row of the sequence. first: index of its first token in the step. n: tokens.
        past: tokens of the sequence already in the cache.
        mask: [n, past + n] bool, True = attend; None when past is 0 (plain causal).
    """

    row: int
    first: int
    n: int
    past: int
    mask: Tensor | None = None


@dataclass(frozen=True)
class Step:
    """The T tokens of one forward pass: where each stands (on the device), and sizes known on the host.

    Attributes:
        rows: [T] int64, cache row of each token.
        positions: [T] int64, position of each token in its sequence.
        logits_at: [R] int64, tokens whose logits are wanted; None = all.
        spans: the sequences of a prefill; None in a decode step: token t is the next of cache row t.
        bound: decode: keys 0 .. bound - 1 are looked at; at least every position + 1.
        mask: decode: [T, 1, 1, bound] bool, True = attend.
        num_tokens: [] int32 on the device, tokens that count where T is only a bound (a captured graph); the
            others are routed to no expert and their output means nothing. None = all T.
    """

    rows: Tensor
    positions: Tensor
    logits_at: Tensor | None = None
    spans: tuple[Span, ...] | None = None
    bound: int = 0
    mask: Tensor | None = None
    num_tokens: Tensor | None = None


class AttentionCache(Protocol):
    """What the model needs: attention over everything seen so far. Nobody asks for dense keys and values."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """Keep this layer's k and v [T, kv heads, head_dim]; attend with q [T, heads, head_dim] -> as q."""


class Uncached:
    """Causal attention over B whole sequences of S tokens each, packed; nothing is kept."""

    def __init__(self, B: int, S: int):
        self.B, self.S = B, S

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        q, k, v = (x.view(self.B, self.S, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2).reshape(self.B * self.S, *out.shape[1::2])


class StaticCache:
    """Dense keys and values of B sequences, allocated once.

    Attributes:
        k, v: [layers, B, kv heads, capacity, head_dim]. lengths: tokens of each row, on the host.
    """

    def __init__(
        self,
        config: Qwen3MoeConfig,
        B: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ):
        shape = (config.num_hidden_layers, B, config.num_key_value_heads, capacity, config.head_dim)
        # zeros, not empty: a masked key still meets its value as 0 * value, which must not be NaN
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.capacity = capacity
        self.lengths = [0] * B

    @staticmethod
    def nbytes(config: Qwen3MoeConfig, B: int, capacity: int, dtype: torch.dtype) -> int:
        """Bytes a cache of this size holds."""
        per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        return B * capacity * per_token * dtype.itemsize

    def prefill(self, chunks: Sequence[tuple[int, int]], logits_at: Sequence[int]) -> Step:
        """Plan a step over `chunks`, (row, tokens) each, packed in that order; the rows grow by it.

        Args:
            logits_at: indices of the packed tokens whose logits are wanted.

        Raises:
            RequestError: a row would grow past the capacity.
        """
        device, spans, first = self.k.device, [], 0
        for row, n in chunks:
            past = self.lengths[row]
            mask = torch.ones(n, past + n, dtype=torch.bool, device=device).tril(past) if past else None
            spans.append(Span(row, first, n, past, mask))
            self._grow(row, n)
            first += n
        rows = [span.row for span in spans for _ in range(span.n)]
        positions = [span.past + i for span in spans for i in range(span.n)]
        return Step(
            rows=torch.tensor(rows, dtype=torch.int64, device=device),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            logits_at=torch.tensor(logits_at, dtype=torch.int64, device=device),
            spans=tuple(spans),
        )

    def decode(self) -> Step:
        """Plan a step of one token for every row, in row order; each row grows by one.

        Raises:
            RequestError: a row is full.
        """
        device = self.k.device
        positions = torch.tensor(self.lengths, dtype=torch.int64, device=device)
        for row in range(len(self.lengths)):
            self._grow(row, 1)
        bound = max(self.lengths)
        mask = torch.arange(bound, device=device) <= positions[:, None]
        rows = torch.arange(len(self.lengths), device=device)
        return Step(rows=rows, positions=positions, bound=bound, mask=mask[:, None, None])

    def keep(self, rows: Sequence[int]) -> None:
        """Drop every row but these (ascending), which become rows 0 .. len(rows) - 1."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.k.device)
        for layer in range(self.k.shape[0]):  # a layer at a time: the copy stays small
            for kept in (self.k[layer], self.v[layer]):
                kept[: len(rows)] = kept[index]
        self.lengths = [self.lengths[row] for row in rows]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        keys, values = self.k[layer], self.v[layer]
        keys[step.rows, :, step.positions] = k
        values[step.rows, :, step.positions] = v
        if step.spans is None:
            # the query heads of one key/value head are its queries: no key is repeated
            T = q.shape[0]
            grouped = q.unflatten(1, (k.shape[1], q.shape[1] // k.shape[1]))
            k, v = keys[:T, :, : step.bound], values[:T, :, : step.bound]
            return F.scaled_dot_product_attention(grouped, k, v, attn_mask=step.mask).reshape(q.shape)
        out = torch.empty_like(q)
        for span in step.spans:
            own = slice(span.first, span.first + span.n)
            seen = slice(0, span.past + span.n)
            out[own] = F.scaled_dot_product_attention(
                q[own].transpose(0, 1)[None],
                keys[span.row, :, seen][None],
                values[span.row, :, seen][None],
                attn_mask=span.mask,
                is_causal=span.mask is None,
                enable_gqa=q.shape[1] != k.shape[1],
            )[0].transpose(0, 1)
        return out

    def _grow(self, row: int, n: int) -> None:
        if self.lengths[row] + n > self.capacity:
            raise RequestError(
                f"sequence {row} does not fit the KV cache",
                got=f"{self.lengths[row]} tokens and {n} more",
                expected=f"at most {self.capacity}",
                remedy="make the cache with a larger capacity",
            )
        self.lengths[row] += n
