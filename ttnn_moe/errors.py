"""Errors for people: what is wrong, what was got, what was expected, what to do."""

from __future__ import annotations

from collections.abc import Sequence


class TtnnMoeError(Exception):
    """Base of every error this package raises on purpose.

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
        parts = [what.rstrip(".")]
        if got is not None:
            parts.append(f"got {got}")
        if expected is not None:
            parts.append(f"expected {expected}")
        if remedy is not None:
            parts.append(f"to fix it: {remedy}")
        super().__init__("\n  ".join(("; ".join(parts) + ".", *details)))


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
