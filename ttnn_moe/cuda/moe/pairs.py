"""Arithmetic of T * K token-expert pairs that every family shares."""

from __future__ import annotations

from ...contract import Problem
from ...sizes import ceil_div


def why_not_few(problem: Problem, most: int) -> str | None:
    """Why the pairs of a problem should be sorted, or None.

    Few pairs seldom share an expert, so each may read its expert's weights alone, without a sort. The reason does not
    give the number of pairs, so that many T have the same reason.
    """
    pairs, fit = problem.T * problem.K, problem.E // 3
    if pairs > most:
        return f"it runs up to {most} pairs (T * K)"
    if problem.T > 1 and pairs > fit:
        return f"of more than one token it runs up to E / 3 = {fit} pairs (T * K)"
    return None


def rows_an_expert(problem: Problem) -> float:
    """Average rows of an expert that has any, where the pairs spread over as many experts as they can."""
    pairs = problem.T * problem.K
    return pairs / max(min(problem.E, pairs), 1)


def local_experts(problem: Problem) -> int:
    """Experts of one of the devices that share them."""
    return problem.E // problem.D


def tiles_bound(rows: int, E: int, m: int) -> int:
    """Tiles of m rows that any routing of `rows` sorted rows to E experts can need."""
    return min(ceil_div(rows, m) + min(E, rows), rows)
