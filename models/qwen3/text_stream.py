"""Text of one sequence whose tokens come one at a time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

UNFINISHED = "\ufffd"
BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
"""A token that a ByteFallback decoder reads as a byte."""
MOST, LAST = 16, 4
"""Tokens that are decoded again and again, at most; of these, the last ones alone may hold a character's first bytes.
A character has four bytes at most."""


class Decodes(Protocol):
    """What a stream needs of a tokenizer."""

    @property
    def reads_bytes(self) -> bool:
        """Whether its decoder reads a run of BYTE tokens as a whole."""

    def word(self, token: int, skip_special_tokens: bool) -> str | None:
        """A token as the vocabulary writes it; None: `decode` leaves it out."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids."""


class TextStream:
    """Turns one sequence's tokens into pieces of text whose concatenation is the decoded whole.

    Bytes of a character that is not complete yet are held back. A run of byte tokens of a ByteFallback decoder is held
    back to its end, since one broken byte there changes the whole run. A piece costs the same however many came before.
    """

    def __init__(self, tokenizer: Decodes, skip_special_tokens: bool = True):
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        # the caller has the text of `_before`; it stays as context: some decoders treat the first token apart
        self._before: list[int] = []
        self._pending: list[int] = []
        self._shown = 0

    def push(self, token: int) -> str:
        """The text that this token completes; often a word, sometimes nothing."""
        word = self._tokenizer.word(token, self._skip)
        if word is None:
            return ""
        self._pending.append(token)
        if self._tokenizer.reads_bytes and BYTE.fullmatch(word):
            return ""
        text = self._new_text()
        if not text.endswith(UNFINISHED):
            return self._all_of(text)
        # where bytes are missing, only the last replacement character can still change
        piece = text[self._shown : -1]
        self._shown = len(text) - 1
        if len(self._pending) >= MOST:
            self._settle(text)
        return piece

    def finish(self) -> str:
        """What is left when no token follows."""
        return self._all_of(self._new_text())

    def _all_of(self, text: str) -> str:
        """What was not given yet of the pending tokens' text; they are the context from now on."""
        piece = text[self._shown :]
        self._before, self._pending, self._shown = self._pending, [], 0
        return piece

    def _new_text(self) -> str:
        return self._after(self._before, self._pending)

    def _after(self, before: list[int], tokens: list[int]) -> str:
        """What tokens add to the text of those before."""
        return self._tokenizer.decode(before + tokens, self._skip)[len(self._tokenizer.decode(before, self._skip)) :]

    def _settle(self, text: str) -> None:
        """Make context of pending tokens that no later one can change: the first ones, up to where a character ends.

        One of any LAST neighbouring places is such an end.
        """
        for n in range(len(self._pending) - LAST, max(0, len(self._pending) - 2 * LAST), -1):
            done, left = self._pending[:n], self._pending[n:]
            first, rest = self._after(self._before, done), self._after(done, left)
            if first + rest == text and rest:
                self._before, self._pending, self._shown = done, left, self._shown - len(first)
                return
