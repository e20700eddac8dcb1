"""A call in a process of its own: what ends that process, or spoils its device, ends this call alone."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from ..visible import said

R = TypeVar("R")


def call_apart(seconds: float, function: Callable[..., R], *arguments: object) -> R:
    """What function(*arguments) returns in a new process, which ends with the call. All of it must be picklable.

    Raises:
        RuntimeError: the function raised, its process died, or nothing was returned within `seconds`.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, function, arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            raise RuntimeError(f"no result within {seconds:g} s; its process was ended")
        result, failure = ours.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"its process {_end(process.exitcode or 0)} without a result") from None
    finally:
        process.kill()
        process.join(10)  # the driver may hold it for longer
        ours.close()
    if failure is not None:
        raise RuntimeError(failure)
    return result  # type: ignore[no-any-return]


def _answer(theirs: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    result, failure = None, None
    try:
        result = function(*arguments)
    except Exception as error:  # of any kind: it is told to the caller
        failure = said(error)
    theirs.send((result, failure))


def _end(exitcode: int) -> str:
    with suppress(ValueError):
        return f"died by {signal.Signals(-exitcode).name}"
    return f"ended with exit code {exitcode}"
