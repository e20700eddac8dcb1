"""Interrupts at every line of some files, as Ctrl-C may come."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any


class Interrupt(BaseException):
    """Stands in for KeyboardInterrupt, which ends a test run."""


def tracer(at: int, lines: Iterator[int], modules: tuple[ModuleType, ...]) -> Callable[..., Any]:
    """A trace function that raises Interrupt before line number `at` of those that run in these modules."""
    files = {module.__file__ for module in modules}

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in files:
            return None
        if event == "line" and next(lines) == at:
            raise Interrupt
        return trace

    return trace


def run_to(at: int, work: Callable[[], object], *modules: ModuleType) -> int:
    """work(), with an Interrupt before line `at`, from 0, of those that run in these modules; how many ran."""
    before, lines = sys.gettrace(), itertools.count()
    sys.settrace(tracer(at, lines, modules))
    try:
        work()
    finally:
        sys.settrace(before)
    return next(lines)


def each_interrupt(work: Callable[[], object], check: Callable[[], object], *modules: ModuleType) -> int:
    """check() after each run of `work` that is interrupted one line later, up to one that is not; how many were.

    The first lines, such as of tables that are made once, are fewer in later runs.
    """
    for at in itertools.count():
        try:
            run_to(at, work, *modules)
        except Interrupt:
            check()
            continue
        check()
        return at
    raise AssertionError
