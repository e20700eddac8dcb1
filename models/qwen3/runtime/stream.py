"""The stream that a client reads tokens from."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from .requests import Request, Token


class Stream(Iterator[Token]):
    """Tokens of some requests as they come; the engine steps when none is there. Closing it, or losing it before its
    end, cancels the requests: their pages are free for others.

    Args:
        requests: whose `unread` is one deque. step: run one step. lost: numbers of requests whose stream is gone.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        take: Callable[[Sequence[Request]], Token],
        cancel: Callable[[int], bool],
        lost: deque[int],
    ):
        self._requests, self._take, self._cancel, self._lost = requests, take, cancel, lost

    def __next__(self) -> Token:
        return self._take(self._requests)

    def close(self) -> None:
        """End the requests that have not ended."""
        for request in self._requests:
            self._cancel(request.number)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        # at any moment, even within a step: the engine looks at it before the next one
        for request in getattr(self, "_requests", ()):
            self._lost.append(request.number)
