"""Logging through loguru: silent as a library, on stderr when asked.

Ask with TTNN_MOE_LOG=debug (or info, warning, ...) before the first import, with `logs.enable("debug")`,
or with `ttnn-moe --verbose`. An application with loguru sinks of its own may call
`logger.enable("ttnn_moe")` instead.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from loguru import logger

from .errors import ContractError
from .visible import shown, visible

if TYPE_CHECKING:
    from loguru import Record

ENV = "TTNN_MOE_LOG"
LEVELS = ("trace", "debug", "info", "success", "warning", "error", "critical")
_OURS = "ttnn_moe"

_sink: int | None = None


def setup() -> None:
    """Silence this package's records unless TTNN_MOE_LOG asks for them. For ttnn_moe/__init__.py, once."""
    logger.disable(_OURS)
    level = os.environ.get(ENV, "")
    if not level or sys.stderr is None:  # None: it was closed when Python started
        return
    try:
        enable(level)
    except ContractError as error:  # a slip in a log level must not keep anyone from importing the package
        ignored = ContractError(
            f"{ENV} is ignored", got=error.got, expected=error.expected, remedy=f"correct or unset {ENV}"
        )
        print(f"ttnn-moe: warning: {ignored}", file=sys.stderr)


def enable(level: str = "debug") -> None:
    """Print this package's records from `level` on to stderr; a second call replaces the level.

    Raises:
        ContractError: no such level.
    """
    global _sink
    if level.lower() not in LEVELS:
        raise ContractError("no such log level", got=shown(level), expected=f"one of {', '.join(LEVELS)}")
    if _sink is not None:
        logger.remove(_sink)
    else:
        _narrow_default_sink()
    _sink = logger.add(sys.stderr, level=level.upper(), filter=_is_ours, format=_format)
    logger.enable(_OURS)


_FORMAT = "<dim>{time:HH:mm:ss.SSS}</dim> <level>{level: <7}</level> {name}: {extra[shown]}\n{exception}"


def _format(record: Record) -> str:
    """A record's line; control characters of its message are shown, not sent."""
    record["extra"]["shown"] = visible(record["message"])
    return _FORMAT


def _is_ours(record: Record) -> bool:
    name = record["name"] or ""
    return name == _OURS or name.startswith(_OURS + ".")


def _narrow_default_sink() -> None:
    """Loguru's own sink, number 0, would print our records a second time; others' it must still print."""
    try:
        logger.remove(0)
    except ValueError:
        return  # the application took it away: its sinks are its own affair
    logger.add(sys.stderr, filter=lambda record: not _is_ours(record))
