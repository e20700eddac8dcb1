"""What the scripts share beside what they measure: errors of one line, and results that are written whole."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from ttnn_moe.errors import RequestError, TtnnMoeError
from ttnn_moe.whole_file import check_place, whole_file


def run_script(main: Callable[..., None]) -> None:
    """Entry point of a script: what a user got wrong is one message."""
    try:
        typer.run(main)
    except TtnnMoeError as error:
        raise SystemExit(f"{Path(sys.argv[0]).stem}: {error}") from None


def check_file(path: Path | None, option: str = "--json") -> None:
    """End before the work where the results cannot be written."""
    if path is not None:
        check_place(path, option)


def write(path: Path, data: Any, indent: int | None = 1) -> None:
    """A JSON file, whole or as it was before."""
    with whole_file(path) as part:
        part.write_text(json.dumps(data, indent=indent) + "\n")


def one_of(words: str, known: Any, what: str) -> list[str]:
    """A list that a user gave, each word of it known.

    Raises:
        RequestError: one is not.
    """
    found = words.split(",")
    if unknown := [word for word in found if word not in known]:
        raise RequestError(f"no such {what}", got=", ".join(unknown), expected=f"of {', '.join(known)}")
    return found
