"""Prefill steps as the device runs them: passes of pieces of prompts, padded; each piece begins at a page.

The padding of a piece repeats its last token up to a power of two. It lies at the positions after the piece; the tokens
that belong there are written before anything attends to them. A piece that does not end its prompt holds whole pages:
the tokens that are left wait on the host for the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ttnn_moe.kv.step import PrefillStep
from ttnn_moe.sizes import power_of_2
from ttnn_moe.tenstorrent.memory import PAGE


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one row in a pass.

    Attributes:
        row: of the cache. first: index of its first token in the pass. size: its tokens there, padding included.
        past: tokens of the row before it.
    """

    row: int
    first: int
    size: int
    past: int


@dataclass
class Pass:
    """Tokens that run together.

    Attributes:
        ids, positions: of every token, padding included. pieces: what they belong to.
        ends: indices of the tokens whose logits are wanted.
    """

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


class Packer:
    """Cuts prefill steps into passes, and keeps the tokens that wait for a whole page.

    Args:
        rows: of the cache. longest: tokens of a pass, at most; a power of two. context: positions of the model.
    """

    def __init__(self, rows: int, longest: int, context: int):
        self.longest, self._last = longest, context - 1
        self._waiting: list[list[int]] = [[] for _ in range(rows)]

    def begin(self, row: int) -> None:
        """Forget what waits: another sequence has the row."""
        self._waiting[row] = []

    def passes(self, ids: Sequence[int], step: PrefillStep) -> list[Pass]:
        """The passes over the step's prompts and the tokens that waited; none if all of them wait on.

        Args:
            ids: of all tokens of the step. Those of step.decoding are not run here.
        """
        assert step.logits_at is not None, "logits of every token"
        made, wanted = [Pass()], set(step.logits_at.tolist())
        for span in step.spans:
            waiting, end = self._waiting[span.row], span.first + span.n
            waiting.extend(ids[span.first : end])
            ends = end - 1 in wanted
            # a multiple of PAGE: what has run already
            past = span.past + span.n - len(waiting)
            ready = len(waiting) if ends else len(waiting) // PAGE * PAGE
            for start in range(0, ready, self.longest):
                tokens = waiting[start : min(start + self.longest, ready)]
                size = max(PAGE, power_of_2(len(tokens)))
                if made[-1].ids and len(made[-1].ids) + size > self.longest:
                    made.append(Pass())
                self._add(made[-1], span.row, tokens, past + start, size)
            if ends:
                made[-1].ends.append(made[-1].pieces[-1].first + len(tokens) - 1)
            del waiting[:ready]
        return [one for one in made if one.ids]

    def _add(self, into: Pass, row: int, tokens: list[int], past: int, size: int) -> None:
        into.pieces.append(Piece(row, len(into.ids), size, past))
        into.ids += tokens + tokens[-1:] * (size - len(tokens))
        into.positions += (min(position, self._last) for position in range(past, past + size))
