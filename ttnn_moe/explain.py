"""`ttnn-moe why`: what runs a layer's sizes here, and why nothing else does, as tables."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from rich.console import Console

from . import decoder, registry
from .accelerator import NO_DEVICE
from .contract import Problem
from .errors import RequestError
from .tables import plain, print_table

COLUMNS = ("backend", "runs it", "with, or why not")
VERDICTS = {"runs": "[green]yes[/]", "could": "could", "cannot": "[red]no[/]"}


def device_type(text: str) -> str:
    """The type of a device that torch knows by this name, as in "cuda" of "cuda:1".

    Raises:
        RequestError: torch knows none.
    """
    try:
        return torch.device(text).type
    except RuntimeError:
        raise RequestError("no such device", got=ascii(text), expected="cuda or cpu") from None


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
        rows = [(row.backend, VERDICTS[row.verdict], plain(row.words)) for row in why.rows]
        print_table(console, title if why.chosen else f"{title}: nothing runs it here", COLUMNS, rows)


def where_operators_run(device: str) -> torch.device:
    """A device of this type, or the CPU for a GPU that is not here.

    Raises:
        RequestError: torch cannot use it.
    """
    here = torch.device(device if device != "cuda" or torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=here)
    except NO_DEVICE:
        raise RequestError("torch cannot use this device", got=device, expected="cuda or cpu") from None
    return here


def print_operators(
    tokens: Iterable[int],
    H: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    E: int,
    K: int,
    dtype: torch.dtype,
    device: torch.device,
    console: Console,
) -> None:
    """The other operators of a decoder layer: one table for each answer. Arguments as decoder.why."""
    answers: dict[tuple[decoder.Why, ...], list[int]] = {}
    for T in tokens:
        answers.setdefault(tuple(decoder.why(T, H, heads, kv_heads, head_dim, E, K, dtype, device)), []).append(T)
    for rows, same in answers.items():
        title = f"Other operators of a decoder layer, {' '.join(f'T={T}' for T in same)}"
        cells = [(row.operator, plain(row.runs), plain(_refused(row))) for row in rows]
        print_table(console, title, ("operator", "runs on", "and not on"), cells)


def _refused(row: decoder.Why) -> str:
    """Families with one reason together."""
    by_reason: dict[str, list[str]] = {}
    for family, reason in row.refused:
        by_reason.setdefault(reason, []).append(family)
    return "; ".join(f"{' / '.join(families)}: {reason}" for reason, families in by_reason.items())
