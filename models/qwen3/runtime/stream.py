"""The stream that a client reads tokens from."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from .requests import Request, Token


class Stream(Iterator[Token]):
    """Tokens of some requests as they come; the engine steps when none is there. Closing it, or losing it before its
    end, cancels the requests: their pages are free for others.

    Args:
        requests: whose `unread` is one deque.
        take: the next token of these requests; raises StopIteration after the last.
        cancel: ends the request of a number.
        lost: takes the numbers of requests whose stream is gone.
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
        requests = self._requests  # another thread may close it
        if not requests:
            raise StopIteration
        return self._take(requests)

    def close(self) -> None:
        """End the requests that have not ended. No token follows, not even one that was made before."""
        for request in self._requests:
            self._cancel(request.number)
        self._requests = ()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        # at any moment, even within a step: the engine looks at it before the next one
        for request in getattr(self, "_requests", ()):
            self._lost.append(request.number)
