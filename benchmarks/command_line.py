"""What the scripts share beside what they measure: errors of one line, and results that are written whole."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ttnn_moe.errors import RequestError, TtnnMoeError
from ttnn_moe.sizes import natural
from ttnn_moe.whole_file import check_place, whole_file


def run_script(main: Callable[..., None]) -> None:
    """Entry point of a script: what a user got wrong is one message."""
    try:
        typer.run(main)
    except TtnnMoeError as error:
        raise SystemExit(f"{Path(sys.argv[0]).stem}: {error}") from None


def _place(path: Path | None) -> Path | None:
    """The same; ends before the work where results cannot be written."""
    if path is not None:
        check_place(path, "--json")
    return path


Json = Annotated[Path | None, typer.Option("--json", callback=_place, help="Write the results here, as they come.")]


def write(path: Path, data: Any, indent: int | None = 1) -> None:
    """A JSON file, whole or as it was before."""
    with whole_file(path) as part:
        part.write_text(json.dumps(data, indent=indent) + "\n")


def numbers(text: str) -> list[int]:
    """Those of a list that a user gave, such as 1,8,512.

    Raises:
        RequestError: a word is no number from 1 on.
    """
    words = [word for word in text.split(",") if word]
    if wrong := [word for word in words if not natural(word)]:
        raise RequestError("a list cannot be read", got=", ".join(wrong), expected="numbers from 1 on, as in 1,8,512")
    return [int(word) for word in words]


def one_of(words: str, known: Any, what: str) -> list[str]:
    """A list that a user gave, each word of it known.

    Raises:
        RequestError: one is not.
    """
    found = words.split(",")
    if unknown := [word for word in found if word not in known]:
        raise RequestError(f"no such {what}", got=", ".join(unknown), expected=f"one or more of {', '.join(known)}")
    return found
