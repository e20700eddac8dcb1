"""`ttnn-moe why`: what runs a layer's sizes here, and for each other backend why it does not, as tables."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape

from . import registry
from .contract import Problem
from .tables import print_table

COLUMNS = ("backend", "runs it", "with, or why not")
VERDICTS = {"runs": "[green]yes[/]", "could": "could", "cannot": "[red]no[/]"}


def print_moe(problems: Iterable[Problem], backend: str, console: Console) -> None:
    """One table for each answer, over the numbers of tokens that it holds for.

    Raises:
        BackendUnavailable: no backend of that name.
    """
    answers: dict[registry.Why, list[Problem]] = {}
    for problem in problems:
        answers.setdefault(registry.why(problem, backend), []).append(problem)
    for why, same in answers.items():
        title = f"MoE layer, {' '.join(f'T={problem.T}' for problem in same)}"
        rows = [(row.backend, VERDICTS[row.verdict], escape(row.words)) for row in why.rows]
        print_table(console, title if why.chosen else f"{title}: nothing runs it here", COLUMNS, rows)
