"""One line that holds a whole self-check, for sending back: a mark with the form's version, and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from .check import Outcome

MARK = "ttnn-moe-selfcheck/1"
"""The number changes when a key changes its meaning; new keys do not change it."""
MOST_LETTERS = 500
"""Of one problem."""


def line(
    machine: Sequence[str],
    outcomes: Sequence[Outcome],
    refused: Mapping[str, str],
    failed: Sequence[Sequence[str]] | None,
    **what: object,
) -> str:
    """MARK and an object on one line of ASCII.

    Keys: those of `what`, such as backend and dtype. machine: the lines about it. checks: name -> [error of the worst
    row, median microseconds], null where a run gave none. problems: name -> what went wrong besides the error.
    refused: name -> why nothing was run. failed: the names, for each rank, null where the ranks did not get to tell
    each other.
    """
    checks = {one.name: [_short(one.error), _short(one.microseconds)] for one in outcomes}
    problems = {one.name: one.problem[:MOST_LETTERS] for one in outcomes if one.problem}
    told = {**what, "machine": list(machine), "checks": checks, "problems": problems, "refused": dict(refused)}
    told["failed"] = failed
    return f"{MARK} {json.dumps(told, separators=(',', ':'), default=str, allow_nan=False)}"


def read(text: str) -> dict[str, object]:
    """The object of a line, wherever in the text it stands; raises ValueError where there is none."""
    start = text.index(MARK) + len(MARK)
    found, _ = json.JSONDecoder().raw_decode(text[start:].lstrip())
    return found  # type: ignore[no-any-return]


def _short(value: float | None) -> float | str | None:
    """Three digits; JSON has no infinity."""
    if value is None:
        return None
    return float(f"{value:.3g}") if abs(value) < float("inf") else "inf"
