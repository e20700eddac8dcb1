"""What tests of the plug-in for vLLM share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

import vllm_layers


@pytest.fixture(scope="module")
def make() -> Iterator[Any]:
    """Makes layers of vLLM; the plug-in is registered."""
    with vllm_layers.with_plugin() as made:
        yield made


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    """Layers run on the reference backend, and each line is said anew."""
    from ttnn_moe.integrations.vllm import say

    monkeypatch.setenv("TTNN_MOE_BACKEND", "reference")
    monkeypatch.delenv("TTNN_MOE_VLLM", raising=False)
    monkeypatch.setattr(say, "_SAID", set())


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """What the plug-in says in vLLM's log: level and text."""
    found: list[tuple[int, str]] = []
    logger = logging.getLogger("vllm.ttnn_moe")
    monkeypatch.setattr(logger, "log", lambda level, form, *args: found.append((level, form % args)))
    return found
