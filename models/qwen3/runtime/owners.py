"""Which engine a KV cache serves: two would give its rows and pages to requests of both."""

from __future__ import annotations

import os
import threading
from typing import Any
from weakref import WeakValueDictionary

from ttnn_moe.errors import RequestError
from ttnn_moe.kv.cache import RowCache

_ENGINES: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""By the id of their cache, which lives as long as its engine."""
_LOCK = threading.Lock()


def claim(cache: RowCache, engine: object) -> None:
    """Let this Engine have the cache until it gives it up, or is gone.

    Raises:
        RequestError: another engine has it.
    """
    with _LOCK:
        if _ENGINES.setdefault(id(cache), engine) is not engine:
            raise RequestError(
                "the cache is in use",
                got="the cache of another engine",
                expected="a cache that no engine has",
                remedy="close that engine, or make a cache for each engine",
            )


def _forked() -> None:
    """In a child process: threads that had a lock, or were within a step, are not there."""
    global _LOCK
    _LOCK = threading.Lock()
    for engine in list(_ENGINES.values()):
        engine.forked()


os.register_at_fork(after_in_child=_forked)


def give_up(cache: RowCache, engine: object) -> None:
    """Let another engine have the cache."""
    with _LOCK:
        if _ENGINES.get(id(cache)) is engine:
            del _ENGINES[id(cache)]
