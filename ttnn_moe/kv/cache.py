"""What a KV-cache format is to a model, and what it is to a scheduler.

A model calls `write` and `attend` and knows nothing of how keys and values lie in memory. A scheduler gives rows to
sequences and asks for steps. A new format subclasses RowCache and defines `write` and `attend`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ..arguments import integer
from ..errors import RequestError
from .step import DecodeStep, PrefillStep, Span, Step
from .transfer import to_device


@dataclass(frozen=True)
class CacheSizes:
    """Sizes that a model gives its cache.

    Raises:
        RequestError: a size below 1, or key/value heads that do not divide the heads.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "kv_heads", "head_dim"):
            integer(name, getattr(self, name))
        if self.heads % self.kv_heads:
            raise RequestError(
                "the key/value heads do not divide the heads",
                got=f"{self.heads} heads, {self.kv_heads} key/value heads",
                expected="a multiple of the key/value heads",
                remedy="give the model's own sizes",
            )


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


class FusedWrite(ABC):
    """A cache that can normalise, rotate and write in one kernel. No protocol: isinstance of one is slow."""

    @abstractmethod
    def norm_rope_write(
        self, layer: int, qkv: Tensor, norms: HeadNorms, rope: tuple[Tensor, Tensor], step: Step
    ) -> Tensor | None:
        """decoder.head_norm_rope, then `write`: qkv [T, heads + 2 kv_heads, head_dim] -> q [T, heads, head_dim].

        None: no kernel takes these sizes, and nothing was written.
        """


class RowCache(ABC):
    """Keys and values of `rows` sequences. What an engine asks of a cache format.

    Attributes:
        sizes: of the model. rows: sequences at a time. capacity: tokens of each row, at most.
        lengths: tokens of each row, on the host.
        spare: the dummy row for padding tokens; nothing written there is read.
        moves: `begin` has work to do. sequences: prompts of a captured step, at most.
        total, free: pages of the cache, and those that no row has. A page is the format's unit of allocation.
    """

    sizes: CacheSizes
    rows: int
    capacity: int
    lengths: list[int]
    spare: int
    moves: ClassVar[bool] = False
    sequences: ClassVar[int] = 64

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
        """Take a row's pages back. Work under way may still use them: the device runs later work after it."""

    def room(self, row: int) -> int:
        """Tokens that a row may hold now."""
        return self.capacity

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
            RequestError: a row has no room for its tokens. No row has grown then.
        """
        n, device = len(decoding), self.sizes.device
        spans = self.spans(chunks, decoding)
        first = torch.tensor(decoding, dtype=torch.int64).view(n, 2)
        rows = [first[:, 0], *(torch.full((span.n,), span.row) for span in spans)]
        positions = [first[:, 1], *(torch.arange(span.past, span.past + span.n) for span in spans)]
        wanted = torch.tensor([*range(n), *(n + at for at in logits_at)], dtype=torch.int64)
        T = sum(map(len, rows))
        # one copy, since each one costs a wait
        words = torch.cat((*rows, *positions, wanted)).to(device)
        plan = self.plan(spans)
        decoded = 1 + max((position for _, position in decoding), default=-1)
        return PrefillStep(
            rows=words[:T],
            positions=words[T : 2 * T],
            bound=max([decoded, *(span.past + span.n for span in spans)]),
            logits_at=words[2 * T :],
            spans=tuple(spans),
            plan=torch.tensor(plan, dtype=torch.int32).to(device) if plan else None,
            decoding=self.divided(DecodeStep(words[:n], words[T : T + n], decoded)) if n else None,
        )

    def spans(self, chunks: Sequence[tuple[int, int]], decoding: Sequence[tuple[int, int]] = ()) -> list[Span]:
        """Where the tokens of the chunks lie in a step, behind those of `decoding`; the rows of the chunks grow by it.

        Raises:
            RequestError: as prefill.
        """
        self._check_decoding(decoding)
        spans, lengths, first = [], dict[int, int](), len(decoding)
        for row, n in chunks:
            past = lengths.get(row, self.lengths[row])
            self._check_room(row, past, n)
            spans.append(Span(row, first, n, past))
            lengths[row] = past + n
            first += n
        for row, length in lengths.items():
            self.lengths[row] = length
        return spans

    def captures(self, chunks: Sequence[tuple[int, int]]) -> bool:
        """Whether captured steps serve prompts of these (row, tokens)."""
        return True

    def reserve(self, tokens: int) -> None:
        """What captured steps of prompts need, of so many tokens at most; called before they are captured."""
        return None

    def stage(
        self, chunks: Sequence[tuple[int, int]], decoding: Sequence[tuple[int, int]]
    ) -> tuple[list[Span], list[int]]:
        """What a replay of a captured step of prompts needs before: its spans, and words of PrefillStep.plan.

        The rows of `chunks`, which `captures` took, grow by it. decoding: (row, position) of tokens that come first.

        Raises:
            RequestError: as prefill.
        """
        spans = self.spans(chunks, decoding)
        return spans, self.plan(spans)

    def decode(self, rows: Sequence[int], positions: Sequence[int]) -> DecodeStep:
        """Plan a step of one token for each of these rows, at these positions. The rows do not grow.

        Raises:
            RequestError: a row has no room for it.
        """
        self._check_decoding(list(zip(rows, positions, strict=True)))
        both = to_device([list(rows), list(positions)], self.sizes.device)
        return self.divided(DecodeStep(both[0], both[1], 1 + max(positions, default=0)))

    def plan(self, spans: Sequence[Span]) -> list[int]:
        """Words of PrefillStep.plan for these sequences; empty: the format needs none."""
        return []

    def plan_words(self, tokens: int, sequences: int) -> int:
        """The most words that any packing of so many tokens in so many sequences takes."""
        return 0

    def divided(self, step: DecodeStep) -> DecodeStep:
        """The step with its `units`, where a kernel gains by them: a launch, ahead of those of the layers. `decode` and
        `prefill` do so."""
        return step

    def why_not_captured(self) -> str | None:
        """Why no graph of the device can hold this cache's part of a step; None: one can.

        In a captured step `spans` is empty and sizes are bounds. `plan` and `num_tokens` on the device hold the rest.
        """
        return f"a {type(self).__name__} runs steps that the host plans"

    def why_not_captured_prompts(self) -> str | None:
        """As why_not_captured, of steps with prompts."""
        return self.why_not_captured()

    def begin(self, decoding: Sequence[tuple[int, int]]) -> None:
        """What a replay of a captured decode step of these (row, position) needs before, where `moves` says so."""
        return None

    def replay_inputs(self, n: int) -> dict[str, list[int]]:
        """Operators' arguments that a captured decode step of n rows takes from the host at each replay, by name.

        Only a graph of an NPU asks for them.
        """
        return {}

    def _check_decoding(self, decoding: Sequence[tuple[int, int]]) -> None:
        for row, position in decoding:
            self._check_room(row, position, 1)

    def _check_room(self, row: int, past: int, n: int) -> None:
        tokens, room = past + n, self.room(row)
        if tokens > room:
            larger = "make the cache with a larger capacity, and " if tokens > self.capacity else ""
            raise RequestError(
                f"sequence {row} does not fit the KV cache",
                got=f"{past} tokens and {n} more",
                expected=f"at most {room}",
                remedy=f"{larger}open the row for {tokens} tokens",
            )
