"""What an engine knows of a request, and the stream that a client reads its tokens from."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .generate import Finish, Token
from .sampling import Draws, Sampling
from .tokenizer import TextStream

if TYPE_CHECKING:
    from .engine import Engine


@dataclass(eq=False)
class Request:
    """A prompt and how far it has come.

    Attributes:
        number: what the client calls it; -1: not taken yet. tokens: of the cache that it may need.
        row: of the cache; -1: none yet, or no more. filled: prompt tokens in the cache, or on their way there.
        launched, made: new tokens on the device, and on the host. over: no token follows.
        unread: tokens for its stream. streamed: it has one.
    """

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    draws: Draws
    stop_ids: frozenset[int]
    text: TextStream | None
    number: int = -1
    row: int = -1
    filled: int = 0
    launched: int = 0
    made: int = 0
    over: bool = False
    streamed: bool = False
    unread: deque[Token] = field(default_factory=deque)

    @property
    def tokens(self) -> int:
        return len(self.prompt) + self.max_new_tokens - 1  # the last is not fed

    @property
    def position(self) -> int:
        """Of the new token that is fed next."""
        return len(self.prompt) + self.launched - 1

    def take(self, token: int) -> Token:
        """The next new token, on the host."""
        self.made += 1
        finish: Finish | None = None
        if token in self.stop_ids:
            finish = "stop"
        elif self.made == self.max_new_tokens:
            finish = "length"
        text = ""
        if self.text is not None:
            text = self.text.push(token) + (self.text.finish() if finish is not None else "")
        return Token(self.number, token, text, finish)


class Stream(Iterator[Token]):
    """Tokens of one request as they come; the engine steps when none is there. Closing it, or losing it before its
    end, cancels the request: its pages are free for others."""

    def __init__(self, engine: Engine, request: Request):
        self._engine, self._request = engine, request

    def __next__(self) -> Token:
        return self._engine._next(self._request)

    def close(self) -> None:
        """End the request, unless it has ended."""
        self._engine.cancel(self._request.number)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        # at any moment, even within a step: the engine looks at it before the next one
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine._lost.append(self._request.number)
