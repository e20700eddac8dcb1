"""What does not fit a chip's memory, said in the words of who asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ttnn_moe.errors import RequestError


@contextmanager
def room_for(what: str, got: str, remedy: str) -> Iterator[None]:
    """Turn ttnn's error into RequestError."""
    try:
        yield
    except RuntimeError as error:
        if "out of memory" not in str(error).lower():
            raise
        raise RequestError(f"{what} does not fit the chips' memory", got=got, remedy=remedy) from error
