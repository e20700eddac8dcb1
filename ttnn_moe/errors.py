"""Errors for people: what is wrong, what was got, what was expected, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .visible import cut, visible, words

FIX = "to fix it: "
"""Comes before a remedy."""

_DETAILS, _DETAIL = 40, (500, 2000)
"""Lines below a message; characters of each, the fewer the more there are."""


class TtnnMoeError(Exception):
    """Base of every error this package raises on purpose.

    A message may hold names and values from anywhere: long ones are cut, and control characters are shown as escapes.

    Args:
        what: one sentence that names the thing that is wrong.
        got, expected, remedy: optional parts of the message, kept as attributes.
        details: lines below the message, such as a reason for each thing that was tried; kept too.
    """

    def __init__(
        self,
        what: str,
        *,
        got: object = None,
        expected: object = None,
        remedy: str | None = None,
        details: Sequence[str] = (),
    ):
        self.what, self.got, self.expected, self.remedy, self.details = what, got, expected, remedy, tuple(details)
        parts = [words(what).rstrip(".")]
        if got is not None:
            parts.append(f"got {words(got)}")
        if expected is not None:
            parts.append(f"expected {words(expected)}")
        if remedy is not None:  # a reason that came from elsewhere may hold a remedy of its own
            told = any(FIX in part for part in parts)
            parts.append(f"{'or: ' if told else FIX}{words(remedy)}")
        least, most = _DETAIL
        longest = min(most, max(least, least * _DETAILS // max(1, len(self.details))))
        lines = [cut(line, longest) for line in self.details[:_DETAILS]]
        if len(self.details) > _DETAILS:
            lines.append(f"... and {len(self.details) - _DETAILS} more")
        # by name: torch.compile then shows the text that it cannot raise
        Exception.__init__(self, visible("\n  ".join(("; ".join(parts) + ".", *lines))))

    def __reduce__(self) -> tuple[Any, ...]:
        # without __init__, which would make another message, and whose arguments a subclass may change
        return _again, (type(self), self.args), self.__dict__


def _again(kind: type[TtnnMoeError], args: tuple[object, ...]) -> TtnnMoeError:
    return kind.__new__(kind, *args)


class ContractError(TtnnMoeError, ValueError):
    """A tensor, a size or an option breaks the operator's contract."""


class BackendUnavailable(TtnnMoeError, RuntimeError):
    """The backend asked for cannot run here, or cannot run this problem."""


class GradientsRefused(TtnnMoeError, RuntimeError):
    """Gradients were asked of the operator, which has none."""


class CheckpointError(TtnnMoeError, ValueError):
    """A model directory, its config or one of its weight files cannot be used."""


class RequestError(TtnnMoeError, ValueError):
    """A prompt or a generation option cannot be served."""
