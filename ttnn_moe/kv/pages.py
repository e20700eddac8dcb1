"""Which pages of a cache are free."""

from __future__ import annotations


class PagePool:
    """The free ones of pages 1 .. n. Page 0 is the dummy page: it takes padding, and nobody reads it."""

    def __init__(self, n: int):
        self.n = n
        self._free = list(range(n, 0, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> list[int]:
        """n pages, which must be free."""
        assert 0 <= n <= self.free
        return [self._free.pop() for _ in range(n)]

    def give(self, pages: list[int]) -> None:
        """Take back pages that `take` gave."""
        self._free.extend(reversed(pages))
        assert self.free <= self.n
