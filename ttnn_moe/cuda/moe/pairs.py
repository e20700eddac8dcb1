"""Arithmetic of T * K token-expert pairs that every family shares."""

from __future__ import annotations

from ...contract import Problem
from ...sizes import ceil_div


def why_not_few(problem: Problem, most: int) -> str | None:
    """Why the pairs of a problem should be sorted, or None.

    Few pairs seldom name the same expert: without a sort each reads its expert's weights alone. The reason does not say
    how many pairs there are: so it is one for many T.
    """
    pairs, fit = problem.T * problem.K, problem.E // 3
    if pairs > most:
        return f"it runs up to {most} pairs (T * K)"
    if problem.T > 1 and pairs > fit:
        return f"of more than one token it runs up to E / 3 = {fit} pairs (T * K)"
    return None


def rows_an_expert(problem: Problem) -> float:
    """Rows that an expert with any gets on average, at most."""
    pairs = problem.T * problem.K
    return pairs / max(min(problem.E, pairs), 1)


def local_experts(problem: Problem) -> int:
    """Experts of one of the devices that share them."""
    return problem.E // problem.D


def tiles_bound(rows: int, E: int, m: int) -> int:
    """Tiles of m rows that any routing of `rows` sorted rows to E experts can need."""
    return min(ceil_div(rows, m) + min(E, rows), rows)
