"""A table of backends that a test may change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from ttnn_moe import registry


@contextmanager
def own_registry() -> Iterator[Callable[[str, str], None]]:
    """Yield registry.register; afterwards the table and its order are as before.

    What the registry found out before or within the block is forgotten at its ends: probes read the environment.
    """
    _forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_TARGETS", dict(registry._TARGETS))
        yield registry.register
    _forget()


def _forget() -> None:
    for cached in (registry._class, registry._instance, registry.probe, registry._choose):
        cached.cache_clear()
