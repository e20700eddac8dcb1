"""The KV cache, which owns attention: the model hands it q, k and v and gets the attended values back.

A step's tokens stand packed, one after the other, whatever sequence they belong to: no padding exists, so
none can be attended to or routed to an expert. Only this file knows which token belongs to which sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
        decoding: of a prefill: so many tokens before its sequences are each the next of their row, as in a decode step.
        num_decoding: [] int32 on the device, those of them that count where `decoding` is only a bound. None = all.
        num_tokens: [] int32 on the device, tokens that count where T is only a bound (a captured graph); the
            others are routed to no expert and their output means nothing. None = all T.
        num_wanted: [] int32 on the device, entries of logits_at that count where R is only a bound. None = all.
    """

    rows: Tensor
    positions: Tensor
    logits_at: Tensor | None = None
    spans: tuple[Span, ...] | None = None
    tiles: Tensor | None = None
    bound: int = 0
    mask: Tensor | None = None
    num_tokens: Tensor | None = None
    decoding: int = 0
    num_decoding: Tensor | None = None
    num_wanted: Tensor | None = None

    def wanted(self) -> Step | None:
        """A decode step of the tokens whose logits a prefill wants, for a layer that has kept the keys and values of
        all T (so that two of them may be of one row). None: it wants no fewer than T."""
        at = self.logits_at
        if at is None or self.spans is None or len(at) >= len(self.rows):
            return None
        bound = max((self.bound, *(span.past + span.n for span in self.spans)))
        return Step(self.rows[at], self.positions[at], bound=bound, num_tokens=self.num_wanted)


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


class RowCache(ABC):
    """Keys and values of sequences, one a row.

    Attributes:
        k, v: per layer, what `place` shows; [layers, any, kv heads, any, head_dim].
        layers: the same, layer by layer: the same tensors each time, since tensor maps are kept with them.
        rows: sequences at a time, at most. capacity: tokens of each, at most.
        lengths: tokens of each row, on the host. spare: a row that tokens which do not count may be said to be in.
    """

    k: Tensor
    v: Tensor
    layers: list[tuple[Tensor, Tensor]]
    rows: int
    capacity: int
    heads: int
    lengths: list[int]
    spare = 0

    @property
    def _tiled(self) -> bool:
        """Whether Triton kernels attend: they read no key past a row's length."""
        return ops.fast_heads(self.k, self.heads, self.k.shape[2], self.k.shape[4])

    def prefill(
        self, chunks: Sequence[tuple[int, int]], logits_at: Sequence[int], decoding: Sequence[tuple[int, int]] = ()
    ) -> Step:
        """Plan a step over `chunks`, (row, tokens) each, packed in that order; the rows grow by it.

        Args:
            logits_at: indices of the packed tokens whose logits are wanted, besides those of `decoding`.
            decoding: (row, position) of tokens that stand before them, each the next of its row; those do not grow.

        Raises:
            RequestError: a row would grow past the capacity.
        """
        device, tiled = self.k.device, self._tiled
        n = len(decoding)
        spans = self.spans(chunks, n)
        own = torch.tensor(decoding, dtype=torch.int64).view(n, 2)
        rows = [own[:, 0], *(torch.full((span.n,), span.row) for span in spans)]
        positions = [own[:, 1], *(torch.arange(span.past, span.past + span.n) for span in spans)]
        ends = torch.tensor([*range(n), *(n + at for at in logits_at)], dtype=torch.int64)
        T = sum(map(len, rows))
        # in one copy: a GPU waits for each
        words = torch.cat((*rows, *positions, ends)).to(device)
        return Step(
            rows=words[:T],
            positions=words[T : 2 * T],
            logits_at=words[2 * T :],
            spans=tuple(spans),
            tiles=ops.prefill_tiles(spans, self.k).to(device) if tiled else None,
            bound=1 + max((position for _, position in decoding), default=0),
            decoding=n,
        )

    def spans(self, chunks: Sequence[tuple[int, int]], first: int = 0) -> list[Span]:
        """Where the tokens of a step stand; the rows grow by it. Arguments and errors as `prefill`; first: of the
        tokens of the step, that of the chunks."""
        spans = []
        for row, n in chunks:
            past, mask = self.lengths[row], None
            if past and not self._tiled:
                mask = torch.ones(n, past + n, dtype=torch.bool, device=self.k.device).tril(past)
            spans.append(Span(row, first, n, past, mask))
            self._grow(row, n)
            first += n
        return spans

    def room(self, row: int) -> int:
        """Tokens that a row may hold."""
        return self.capacity

    @abstractmethod
    def place(self, layer: int, step: Step) -> Place:
        """Where a layer's keys and values are."""

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, step: Step) -> Tensor:
        place = self.place(layer, step)
        if step.spans is None:
            return ops.decode_attention(q, place, step.bound, step.mask)
        out = None
        if step.decoding:
            out, n = torch.empty_like(q), step.decoding
            own = replace(place, rows=place.rows[:n], positions=place.positions[:n], num_tokens=step.num_decoding)
            ops.decode_attention(q[:n], own, step.bound, None, out[:n])
        return ops.prefill_attention(q, place, step.spans, step.tiles, out)  # over what does not count above

    def _grow(self, row: int, n: int) -> None:
        if self.lengths[row] + n > self.room(row):
            raise RequestError(
                f"sequence {row} does not fit the KV cache",
                got=f"{self.lengths[row]} tokens and {n} more",
                expected=f"at most {self.room(row)}",
                remedy="make the cache with a larger capacity",
            )
        self.lengths[row] += n


class StaticCache(RowCache):
    """Dense keys and values of B sequences, allocated once.

    Attributes:
        k, v: [layers, B, kv heads, capacity, head_dim].
    """

    def __init__(
        self, config: Qwen3MoeConfig, B: int, capacity: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ):
        shape = (config.num_hidden_layers, B, config.num_key_value_heads, capacity, config.head_dim)
        # zeros, not empty: a masked key still meets its value as 0 * value, which must not be NaN
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.layers = list(zip(self.k, self.v, strict=True))
        self.rows, self.capacity = B, capacity
        self.heads = config.num_attention_heads
        self.lengths = [0] * B

    @staticmethod
    def nbytes(config: Qwen3MoeConfig, B: int, capacity: int, dtype: torch.dtype) -> int:
        """Bytes a cache of this size holds."""
        per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        return B * capacity * per_token * dtype.itemsize

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
        return Place(*self.layers[layer], step.rows, step.positions, step.num_tokens)
