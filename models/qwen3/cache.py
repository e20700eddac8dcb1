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

from . import ops
from .config import Qwen3MoeConfig
from .ops import Place


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one sequence in a packed step.

    Attributes:
        row: cache row of the sequence. first: index of its first token in the step. n: tokens.
        past: tokens of the sequence already in the cache.
        mask: [n, past + n] bool, True = attend; None when past is 0 (plain causal), or the step has tiles.
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
        spans: the sequences of a prefill; None in a decode step: token t is the next of cache row rows[t].
        tiles: of a prefill, where the Triton kernel serves: see ops.prefill_attention.
        bound: decode: keys 0 .. bound - 1 are looked at; at least every position + 1.
        mask: decode: [T, 1, 1, bound] bool, True = attend; rows[t] is then t. None: rows are in any order, each at
            most once, and lengths are read on the device.
        num_tokens: [] int32 on the device, tokens that count where T is only a bound (a captured graph); the
            others are routed to no expert and their output means nothing. None = all T.
    """

    rows: Tensor
    positions: Tensor
    logits_at: Tensor | None = None
    spans: tuple[Span, ...] | None = None
    tiles: Tensor | None = None
    bound: int = 0
    mask: Tensor | None = None
    num_tokens: Tensor | None = None


class AttentionCache(Protocol):
    """What the model needs: attention over everything seen so far. Nobody asks for dense keys and values."""

    def place(self, layer: int, step: Step) -> Place | None:
        """Dense memory that takes this layer's keys and values as they are made; None: attend keeps them."""

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, step: Step) -> Tensor:
        """Attend with q [T, heads, head_dim] -> as q. k and v [T, kv heads, head_dim]: None where place took them."""


class Uncached:
    """Causal attention over B whole sequences of S tokens each, packed; nothing is kept."""

    def __init__(self, B: int, S: int):
        self.B, self.S = B, S

    def place(self, layer: int, step: Step) -> None:
        return None

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, step: Step) -> Tensor:
        assert k is not None and v is not None
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
        self.heads = config.num_attention_heads
        self.lengths = [0] * B

    @property
    def _tiled(self) -> bool:
        """Whether Triton kernels attend: they read no key past a row's length."""
        return ops.fast_heads(self.k, self.heads, self.k.shape[2], self.k.shape[4])

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
        device, tiled = self.k.device, self._tiled
        spans = self.spans(chunks)
        rows = [torch.full((span.n,), span.row) for span in spans]
        positions = [torch.arange(span.past, span.past + span.n) for span in spans]
        return Step(
            rows=torch.cat(rows).to(device),
            positions=torch.cat(positions).to(device),
            logits_at=torch.tensor(logits_at, dtype=torch.int64, device=device),
            spans=tuple(spans),
            tiles=ops.prefill_tiles(spans, self.k).to(device) if tiled else None,
        )

    def spans(self, chunks: Sequence[tuple[int, int]]) -> list[Span]:
        """Where the tokens of a step stand; the rows grow by it. Arguments and errors as `prefill`."""
        spans, first = [], 0
        for row, n in chunks:
            past, mask = self.lengths[row], None
            if past and not self._tiled:
                mask = torch.ones(n, past + n, dtype=torch.bool, device=self.k.device).tril(past)
            spans.append(Span(row, first, n, past, mask))
            self._grow(row, n)
            first += n
        return spans

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

    def clear(self, B: int) -> None:
        """Forget everything; rows 0 .. B-1 are in use from now on."""
        if not self._tiled:
            self.v[:, :B].zero_()  # as at the start
        self.lengths = [0] * B

    def keep(self, rows: Sequence[int]) -> None:
        """Drop every row but these (ascending), which become rows 0 .. len(rows) - 1."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.k.device)
        for layer in range(self.k.shape[0]):  # a layer at a time: the copy stays small
            for kept in (self.k[layer], self.v[layer]):
                kept[: len(rows)] = kept[index]
        self.lengths = [self.lengths[row] for row in rows]

    def place(self, layer: int, step: Step) -> Place:
        return Place(self.k[layer], self.v[layer], step.rows, step.positions, step.num_tokens)

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, step: Step) -> Tensor:
        place = self.place(layer, step)
        if step.spans is None:
            return ops.decode_attention(q, place, step.bound, step.mask)
        return ops.prefill_attention(q, place, step.spans, step.tiles)

    def _grow(self, row: int, n: int) -> None:
        if self.lengths[row] + n > self.capacity:
            raise RequestError(
                f"sequence {row} does not fit the KV cache",
                got=f"{self.lengths[row]} tokens and {n} more",
                expected=f"at most {self.capacity}",
                remedy="make the cache with a larger capacity",
            )
        self.lengths[row] += n
