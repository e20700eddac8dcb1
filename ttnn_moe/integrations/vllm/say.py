"""Lines in vLLM's log, each once a process: a model has dozens of layers that are alike."""

from __future__ import annotations

import logging

from ...visible import visible

# a child of vLLM's own logger, whose handlers and level vLLM sets
_LOGGER = logging.getLogger("vllm.ttnn_moe")
_SAID: set[str] = set()


def info(text: str) -> None:
    _once(logging.INFO, text)


def warning(text: str) -> None:
    _once(logging.WARNING, text)


def error(text: str) -> None:
    _once(logging.ERROR, text)


def _once(level: int, text: str) -> None:
    if text not in _SAID:
        _SAID.add(text)
        _LOGGER.log(level, "ttnn-moe: %s", visible(text))
