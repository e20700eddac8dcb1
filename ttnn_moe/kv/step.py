"""One forward pass over packed tokens: which sequence each token belongs to, and at which position.

A step is a prefill (prompts, or pieces of them) or a decode (one token a sequence). Tokens are packed without padding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..errors import RequestError


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one sequence in a packed step.

    Attributes:
        row: cache row of the sequence.
        first: index of its first token in the step.
        n: tokens.
        past: tokens of the sequence that the cache holds already.
    """

    row: int
    first: int
    n: int
    past: int


@dataclass(frozen=True)
class DecodeStep:
    """T tokens, each the next of its row.

    Attributes:
        rows: [T] int64, cache row of each token; each row at most once.
        positions: [T] int64, position of each token in its sequence.
        bound: every position is below it.
        num_tokens: [] int32 on the device, the number of valid tokens where T is a bound (a captured step). The others
            are padding: routed to no expert, written nowhere, output undefined. None: all T.
        lengths: positions + 1, on the host, for a cache whose attention takes host numbers. None: it takes none, or the
            step is captured.
        past_written: the keys and values before each position were written by earlier steps. False: some may be of this
            step, so several of its tokens may be of one row.
        units: of RowCache.divided: what blocks of attention take. None: a block takes a row.
    """

    rows: Tensor
    positions: Tensor
    bound: int
    num_tokens: Tensor | None = None
    lengths: tuple[int, ...] | None = None
    past_written: bool = True
    units: Tensor | None = None


@dataclass(frozen=True)
class PrefillStep:
    """T tokens: those of `decoding` first, then the sequences of `spans`, packed.

    Attributes:
        rows, positions: [T] int64, as in DecodeStep; a row may stand many times.
        bound: every position is below it.
        logits_at: [R] int64, the tokens whose logits are wanted. None: all T.
        spans: the sequences, on the host; empty in a captured step, where `plan` holds them.
        plan: int32 words on the device that the cache's attention reads; the cache's own format. None: it needs none.
        decoding: the first tokens of the step, each the next of its row. None: no such tokens.
        num_tokens: as in DecodeStep.
        num_wanted: [] int32 on the device, valid entries of logits_at where R is a bound. None: all R.
        wanted_lengths: DecodeStep.lengths of `wanted`.
    """

    rows: Tensor
    positions: Tensor
    bound: int
    logits_at: Tensor | None
    spans: tuple[Span, ...]
    plan: Tensor | None = None
    decoding: DecodeStep | None = None
    num_tokens: Tensor | None = None
    num_wanted: Tensor | None = None
    wanted_lengths: tuple[int, ...] | None = None

    def wanted(self) -> DecodeStep | None:
        """A step of the tokens of logits_at, for a layer that has written the keys and values of all T.

        Several of its tokens may be of one row. None: all T are wanted.
        """
        at = self.logits_at
        if at is None or len(at) >= len(self.rows):
            return None
        return DecodeStep(
            self.rows[at], self.positions[at], self.bound, self.num_wanted, self.wanted_lengths, past_written=False
        )


Step = DecodeStep | PrefillStep


def check_once(rows: Sequence[int]) -> None:
    """For a cache whose attention does not see a row's tokens of the same step, but those of one chunk.

    Raises:
        RequestError: a row stands twice.
    """
    if len(set(rows)) < len(rows):
        row, n = Counter(rows).most_common(1)[0]
        raise RequestError(
            "a row stands twice in one step",
            got=f"row {row} {n} times",
            expected="each row once, in chunks and decoding together",
            remedy="give a row's tokens as one chunk, or in several steps",
        )
