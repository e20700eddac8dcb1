"""ttnn's out-of-memory errors as errors of the request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ttnn_moe.errors import RequestError


@contextmanager
def room_for(what: str, got: str, remedy: str) -> Iterator[None]:
    """Turn an out-of-memory error inside the `with` block into RequestError."""
    try:
        yield
    except RuntimeError as error:
        if "out of memory" not in str(error).lower():
            raise
        raise RequestError(f"{what} does not fit the chips' memory", got=got, remedy=remedy) from error
