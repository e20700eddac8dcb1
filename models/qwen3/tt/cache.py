"""The KV cache on the device, in pages of one tile's height, and what the steps of a generation are.

A prompt's pieces are padded to a power of two, with its last token again: those are at positions past the prompt, where
nothing looks before the tokens that belong there are written. A piece that is not a prompt's last begins and ends
at a page: what is left over waits on the host for the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ttnn_moe.errors import RequestError
from ttnn_moe.sizes import power_of_2 as bucket
from ttnn_moe.tenstorrent import Device, tensors

from ..config import Qwen3MoeConfig
from .memory import room_for

PAGE = 32
MAX_ROWS = 32
"""Sequences at a time: a token of each fills one tile."""
LONGEST = 2048
"""Tokens of a forward pass, at most: longer prompts run in pieces."""


@dataclass(frozen=True)
class Prefill:
    """Pieces of prompts, as generate hands them over: (row, tokens), packed; logits_at: the last tokens of prompts."""

    chunks: tuple[tuple[int, int], ...]
    logits_at: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one row in a pass.

    Attributes:
        first: of its tokens in the pass. size: its tokens there, padded. past: tokens of the row before it.
    """

    row: int
    first: int
    size: int
    past: int


@dataclass
class Pass:
    """Tokens that run together: ids and positions, padded, and which tokens' logits are wanted."""

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Decode:
    """One token of each row in use, at these positions."""

    positions: tuple[int, ...]


def check_rows(rows: int) -> None:
    """Raise RequestError if these are more sequences than run at a time."""
    if rows > MAX_ROWS:
        raise RequestError(
            "too many sequences at a time for the device",
            got=rows,
            expected=f"at most {MAX_ROWS}",
            remedy="generate in several batches",
        )


class PagedCache:
    """Keys and values of up to 32 sequences.

    Attributes:
        k, v: for each layer, [pages, kv heads, PAGE, head_dim] in tiles. Page 0 takes what does not count.
        rows, capacity: sequences at a time, and tokens of each, at most. lengths: tokens of each row so far.
        longest: tokens of a pass, a power of two.

    Raises:
        RequestError: more than 32 rows, or no room for this on the device.
    """

    def __init__(self, config: Qwen3MoeConfig, device: Device, rows: int, capacity: int, longest: int = LONGEST):
        check_rows(rows)
        self.device, self.rows, self.capacity, self.longest = device, rows, capacity, longest
        self._each = -(-capacity // PAGE)
        self._last = config.max_position_embeddings - 1
        shape = (1 + rows * self._each, config.num_key_value_heads, PAGE, config.head_dim)
        size = f"{self.nbytes(config, rows, capacity) / 2**20:.0f} MiB for {rows} sequences of {capacity} tokens"
        with room_for("the KV cache", size, "fewer or shorter sequences at a time"):
            made = [
                [tensors.zeros(shape, "bfloat16", "TILE", device) for _ in range(2)]
                for _ in range(config.num_hidden_layers)
            ]
        self.k, self.v = [k for k, _ in made], [v for _, v in made]
        self.clear(rows)

    @staticmethod
    def nbytes(config: Qwen3MoeConfig, rows: int, capacity: int) -> int:
        """Bytes that a cache of this size takes on every chip."""
        per_page = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * PAGE
        return (1 + rows * -(-capacity // PAGE)) * per_page

    def clear(self, B: int) -> None:
        """Forget everything; rows 0 .. B-1 are in use from now on."""
        self.lengths = [0] * B
        self._waiting: list[list[int]] = [[] for _ in range(B)]
        self._pages = [list(range(1 + row * self._each, 1 + (row + 1) * self._each)) for row in range(self.rows)]

    def keep(self, rows: Sequence[int]) -> None:
        """Drop every row but these (ascending), which become rows 0 .. len(rows) - 1: their pages stay in place."""
        others = [row for row in range(self.rows) if row not in rows]
        self._pages = [self._pages[row] for row in (*rows, *others)]
        self.lengths = [self.lengths[row] for row in rows]
        self._waiting = [self._waiting[row] for row in rows]

    def prefill(
        self, chunks: Sequence[tuple[int, int]], logits_at: Sequence[int], decoding: Sequence[Any] = ()
    ) -> Prefill:
        """Plan a step over pieces of prompts, (row, tokens) each; logits_at: the last tokens of those that end.

        Raises:
            RequestError: a row would grow past the capacity.
        """
        assert not decoding, "rows do not decode while prompts run"
        for row, n in chunks:
            self._grow(row, n)
        return Prefill(tuple(chunks), tuple(logits_at))

    def decode(self) -> Decode:
        """Plan a step of one token for every row in use; each grows by one.

        Raises:
            RequestError: a row is full.
        """
        positions = tuple(self.lengths)
        for row in range(len(positions)):
            self._grow(row, 1)
        return Decode(positions)

    def passes(self, ids: Sequence[int], step: Prefill) -> list[Pass]:
        """What is to run of a step's tokens and of those that waited."""
        made = [Pass()]
        at, wanted = 0, set(step.logits_at)
        for row, n in step.chunks:
            waiting = self._waiting[row]
            waiting.extend(ids[at : at + n])
            at += n
            ends = at - 1 in wanted
            # what has run already is a multiple of PAGE
            past = self.lengths[row] - len(waiting)
            ready = len(waiting) if ends else len(waiting) // PAGE * PAGE
            for start in range(0, ready, self.longest):
                tokens = waiting[start : min(start + self.longest, ready)]
                size = max(PAGE, bucket(len(tokens)))
                if made[-1].ids and len(made[-1].ids) + size > self.longest:
                    made.append(Pass())
                self._add(made[-1], row, tokens, past + start, size)
            if ends:
                made[-1].ends.append(made[-1].pieces[-1].first + len(tokens) - 1)
            del waiting[:ready]
        return [one for one in made if one.ids]

    def tables(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """int32 pages that a piece is written to [1, size / PAGE], and that it attends to [1, any]."""
        first = piece.past // PAGE
        # room for the padding of the longest piece
        whole = self._pages[piece.row] + [0] * (bucket(self._each) + 1)
        return torch.tensor([whole[first : first + piece.size // PAGE]]).int(), torch.tensor([whole]).int()

    def table(self, rows: Sequence[int]) -> Tensor:
        """int32 [len(rows), pages of a row]."""
        return torch.tensor([self._pages[row] for row in rows]).int()

    def _add(self, into: Pass, row: int, tokens: list[int], past: int, size: int) -> None:
        into.pieces.append(Piece(row, len(into.ids), size, past))
        into.ids += tokens + tokens[-1:] * (size - len(tokens))
        into.positions += (min(position, self._last) for position in range(past, past + size))

    def _grow(self, row: int, n: int) -> None:
        if self.lengths[row] + n > self.capacity:
            raise RequestError(
                f"sequence {row} does not fit the KV cache",
                got=f"{self.lengths[row]} tokens and {n} more",
                expected=f"at most {self.capacity}",
                remedy="make the session with a larger capacity",
            )
        self.lengths[row] += n
