"""Errors for people: what is wrong, what was got, what was expected, what to do."""

from __future__ import annotations


class TtnnMoeError(Exception):
    """Base of every error this package raises on purpose.

    Args:
        what: one sentence that names the thing that is wrong.
        got, expected, remedy: optional parts of the message, kept as attributes.
    """

    def __init__(self, what: str, *, got: object = None, expected: object = None, remedy: str | None = None):
        self.what, self.got, self.expected, self.remedy = what, got, expected, remedy
        parts = [what.rstrip(".")]
        if got is not None:
            parts.append(f"got {got}")
        if expected is not None:
            parts.append(f"expected {expected}")
        if remedy is not None:
            parts.append(f"to fix it: {remedy}")
        super().__init__("; ".join(parts) + ".")


class ContractError(TtnnMoeError, ValueError):
    """A tensor, a size or an option breaks the operator's contract."""


class BackendUnavailable(TtnnMoeError, RuntimeError):
    """The backend asked for cannot run here, or cannot run this problem."""


class CheckpointError(TtnnMoeError, ValueError):
    """A model directory, its config or one of its weight files cannot be used."""


class RequestError(TtnnMoeError, ValueError):
    """A prompt or a generation option cannot be served."""
