"""What a KV-cache format is to a model, and what it is to a scheduler.

A model calls `write` and `attend` and knows nothing of how keys and values lie in memory. A scheduler gives rows to
sequences and asks for steps. A new format subclasses RowCache and defines `write` and `attend`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from .step import DecodeStep, PrefillStep, Span, Step


@dataclass(frozen=True)
class CacheSizes:
    """Sizes that a model gives its cache."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class HeadNorms:
    """Weights [head_dim] of the RMSNorm of each query and key head, and its eps."""

    q: Tensor
    k: Tensor
    eps: float


class KVCache(Protocol):
    """What a model needs of a cache. A layer writes the step's keys and values, then attends."""

    def write(self, layer: int, k: Tensor, v: Tensor, step: Step) -> None:
        """Keep k and v [T, kv_heads, head_dim] of the step's tokens; k is normalised and rotated."""

    def attend(self, layer: int, q: Tensor, step: Step) -> Tensor:
        """Causal attention of q [T, heads, head_dim] over all that was written, this step included -> as q."""


@runtime_checkable
class FusedWrite(Protocol):
    """A cache that can normalise, rotate and write in one kernel."""

    def norm_rope_write(
        self, layer: int, qkv: Tensor, norms: HeadNorms, rope: tuple[Tensor, Tensor], step: Step
    ) -> Tensor | None:
        """The plain form, then `write`: qkv [T, heads + 2 kv_heads, head_dim] -> q. None: not for these sizes."""


class RowCache(ABC):
    """Keys and values of `rows` sequences. What an engine asks of a cache format.

    Attributes:
        sizes: of the model. rows: sequences at a time. capacity: tokens of each row, at most.
        lengths: tokens of each row, on the host.
        spare: the dummy row for padding tokens; nothing written there is read.
        total, free: pages of the cache, and those that no row has. A page is the format's unit of allocation.
    """

    sizes: CacheSizes
    rows: int
    capacity: int
    lengths: list[int]
    spare: int

    @property
    @abstractmethod
    def total(self) -> int: ...

    @property
    @abstractmethod
    def free(self) -> int: ...

    @abstractmethod
    def needed(self, tokens: int) -> int:
        """Pages that so many tokens of one row take."""

    @abstractmethod
    def open(self, row: int, tokens: int) -> None:
        """Give an empty row the pages for so many tokens; they must be free."""

    @abstractmethod
    def close(self, row: int) -> None:
        """Take a row's pages back. Work under way may still use them: later work on the device comes later."""

    @abstractmethod
    def write(self, layer: int, k: Tensor, v: Tensor, step: Step) -> None:
        """See KVCache."""

    @abstractmethod
    def attend(self, layer: int, q: Tensor, step: Step) -> Tensor:
        """See KVCache."""

    def prefill(
        self, chunks: Sequence[tuple[int, int]], logits_at: Sequence[int], decoding: Sequence[tuple[int, int]] = ()
    ) -> PrefillStep:
        """Plan a step over `chunks`, (row, tokens) each, packed in that order; these rows grow by it.

        Args:
            logits_at: indices, within the chunks, of the tokens whose logits are wanted besides those of `decoding`.
            decoding: (row, position) of tokens that come first, each the next of its row; those rows do not grow.

        Raises:
            RequestError: a row would grow past its room.
        """
        raise NotImplementedError

    def spans(self, chunks: Sequence[tuple[int, int]], first: int = 0) -> list[Span]:
        """Where the tokens of the chunks lie in a step in which they begin at token `first`; the rows grow by it."""
        raise NotImplementedError

    def decode(self, rows: Sequence[int], positions: Sequence[int]) -> DecodeStep:
        """Plan a step of one token for each of these rows."""
        raise NotImplementedError

    def plan(self, spans: Sequence[Span]) -> list[int]:
        """Words of PrefillStep.plan for these sequences; empty: the format needs none."""
        return []

    def plan_words(self, tokens: int, sequences: int) -> int:
        """The most words that any packing of so many tokens in so many sequences takes."""
        return 0
