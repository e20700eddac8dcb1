"""Tables on a terminal, in the one form that the command line prints."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from .visible import visible


def console_of(stderr: bool = False, piped_width: int | None = None) -> Console:
    """The console of standard output, or of stderr: a terminal only where one is, whatever FORCE_COLOR says.

    Args:
        piped_width: columns where it is no terminal; default: rich's 80.
    """
    if (sys.stderr if stderr else sys.stdout).isatty():
        return Console(stderr=stderr)
    return Console(stderr=stderr, force_terminal=False, width=piped_width)


def print_table(console: Console, title: str, columns: Iterable[str], rows: Iterable[tuple[str, ...]]) -> None:
    """Print rows of cells under bold columns; all strings may hold rich's markup.

    A word that is too long for its column, such as a path, goes on in the next line. No word is cut.
    """
    folded = (Column(name, overflow="fold") for name in columns)
    table = Table(*folded, title=f"\n[bold]{title}[/]", title_justify="left", title_style="", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def plain(text: str) -> str:
    """The text as rich's markup that shows it as it is: neither markup nor control characters in it act."""
    return escape(visible(text))
