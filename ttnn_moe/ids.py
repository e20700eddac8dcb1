"""Ids of experts: what a caller may promise of them, and checks that read them back."""

from __future__ import annotations

from torch import Tensor

from .errors import ContractError
from .visible import shown

PROMISES = ("any", "distinct")
"""What a caller may say of the ids of all calls: see ttnn_moe.moe."""


def is_distinct(promise: str) -> bool:
    """Whether the promise of ids is "distinct".

    Raises:
        ContractError: it is neither "any" nor "distinct".
    """
    if not (isinstance(promise, str) and promise in PROMISES):
        raise ContractError(
            "ids is no promise", got=f"ids={shown(promise)}", expected=f"one of {list(PROMISES)}", remedy="leave it out"
        )
    return promise == "distinct"


def check_distinct(ids: Tensor, E: int) -> None:
    """Raise ContractError naming the first (t, k) whose id breaks the promise "distinct". Reads ids back."""
    bad = (ids < 0) | (ids >= E)
    same = (ids[:, :, None] == ids[:, None, :]).tril(-1).any(-1)
    found = (bad | same).nonzero()
    if len(found):
        t, k = found[0].tolist()
        raise ContractError(
            f"ids were promised to be distinct, and are not at t={t}, k={k} ({len(found)} in all)",
            got=f"ids[{t}] = {shown(ids[t].tolist())}",
            expected=f"ids of 0 .. {E - 1}, none twice in a row",
            remedy="call without ids='distinct'",
        )


def check_ids(ids: Tensor, E: int) -> None:
    """Raise ContractError naming the first (t, k) whose id is neither -1 nor in 0 .. E-1. Reads ids back."""
    bad = ((ids < -1) | (ids >= E)).nonzero()
    if len(bad):
        t, k = bad[0].tolist()
        raise ContractError(
            f"expert id out of range at t={t}, k={k} ({len(bad)} in all)",
            got=int(ids[t, k]),
            expected=f"-1 (no expert) or 0 .. {E - 1}",
        )
