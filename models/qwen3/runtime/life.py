"""Whether an engine takes calls."""

from __future__ import annotations

from dataclasses import dataclass

from ttnn_moe.errors import RequestError


@dataclass
class Life:
    """What may keep an engine from taking a call.

    Attributes:
        error: what stopped it. closed: by `close`. closing: it closes after the step. stepping: it is within a step.
    """

    error: str | None = None
    closed: bool = False
    closing: bool = False
    stepping: bool = False

    def check(self) -> None:
        """Raise RequestError if it takes no call any more."""
        if self.closed:
            raise RequestError("the engine is closed", got="a call after close()", remedy="make another engine")
        if self.error is not None:
            raise RequestError("the engine stopped in a step", got=self.error, remedy="make another engine")

    def check_between_steps(self) -> None:
        """Raise RequestError within a step, too."""
        if self.stepping:
            raise RequestError(
                "the engine is within a step",
                got="a call by a callback or a signal handler of this step's thread",
                expected="a call between steps",
                remedy="call it after the step",
            )
        self.check()
