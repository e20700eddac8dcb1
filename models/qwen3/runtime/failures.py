"""Errors that outlive the step in which they came."""

from __future__ import annotations

from loguru import logger


def without_frames(error: Exception, number: int) -> Exception:
    """The same error without its traceback, whose frames hold the engine and the tensors of the step.

    The errors that led to it lose theirs too. The log gets the traceback first, at level debug.

    Args:
        number: of the request that the error ends.
    """
    logger.opt(exception=error).debug("request {} ends by an error of its own", number)
    todo: list[BaseException | None] = [error]
    seen: set[int] = set()
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            todo += [one.__cause__, one.__context__]
    return error
