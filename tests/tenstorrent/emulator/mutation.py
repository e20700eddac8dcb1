"""One mistake in a device kernel, and what finds it."""

from __future__ import annotations

from dataclasses import dataclass

EQUIVALENT = "equivalent"


@dataclass(frozen=True)
class Mutation:
    """A mistake.

    Attributes:
        file: below device_kernels. old, new: the text, which the file holds once, and what replaces it.
        mistake: in words.
        found: a kind of finding; "wrong OUTPUT"; "more COUNTER"; or "equivalent".
        reason: why it is equivalent.
        operator: that is run; default: the folder of the file.
    """

    file: str
    old: str
    new: str
    mistake: str
    found: str
    reason: str = ""
    operator: str = ""

    @property
    def runs(self) -> str:
        return self.operator or self.file.split("/")[0]
