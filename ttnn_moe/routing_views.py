"""The views of a routing that kernels read: tensors, and what they hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .arguments import is_size
from .errors import ContractError
from .visible import shown

MOST_ALIGNED = 1 << 20
"""Largest row_align."""

MOST_ROWS = 2**31 - 1
"""Rows of a step tensor."""


@dataclass(frozen=True, eq=False)
class PaddedView:
    """One row of tokens per expert. Duplicates of one (t, e) are merged, so T_e <= T.

    Attributes:
        num_routed_tokens: [E] int32, T_e.
        routed_tokens: [E, T] int32; entries past T_e are undefined and never read.
        routed_token_weights: [E, T] fp32, aligned with routed_tokens.
    """

    num_routed_tokens: Tensor
    routed_tokens: Tensor
    routed_token_weights: Tensor


@dataclass(frozen=True, eq=False)
class SortedView:
    """Token-expert pairs sorted by expert, duplicates kept.

    Attributes:
        expert_offsets: [E+1] int32; expert e owns sorted rows expert_offsets[e] .. expert_offsets[e+1] - 1.
        pairs: [T*K] int32; t*K + k of each sorted row; rows past expert_offsets[E] are undefined.
        inverse: [T, K] int32; the sorted row of pair (t, k), -1 where it names no expert.
    """

    expert_offsets: Tensor
    pairs: Tensor
    inverse: Tensor


@dataclass(frozen=True, eq=False)
class StepLayout:
    """Rows of the step tensors (gate, up, activations): experts in order, each start a multiple of row_align.

    Attributes:
        row_align: 1, or 32 for tiled machines.
        capacity: rows of a step tensor, T*K + (row_align - 1) * min(E, T*K): enough for every routing.
        row_start: [E+1] int32; row_start[e+1] - row_start[e] is T_e rounded up to row_align.
        row_tokens: [capacity] int32; the token of each row, -1 where the row is padding.
        inverse: [T, K] int32; the row of pair (t, k), -1 where there is none or an earlier k names the same expert.
        weights: [T, K] fp32; routing weights with duplicates summed into the first.
    """

    row_align: int
    capacity: int
    row_start: Tensor
    row_tokens: Tensor
    inverse: Tensor
    weights: Tensor


def step_capacity(T: int, K: int, E: int, row_align: int) -> int:
    """Rows that any routing of T tokens to K of E experts can need when every expert starts aligned.

    Raises:
        ContractError: as check_row_align; more rows than int32 numbers.
    """
    row_align = check_row_align(row_align)
    rows = T * K + (row_align - 1) * min(E, T * K)
    if isinstance(rows, int) and rows > MOST_ROWS:
        raise ContractError(
            "the step has too many rows",
            got=f"T={T}, K={K}, E={E}, row_align={row_align}: {rows} rows",
            expected=f"at most {MOST_ROWS}, which int32 numbers",
            remedy="a smaller row_align, or fewer tokens in a call",
        )
    return rows


def check_row_align(row_align: int) -> int:
    """row_align as an int; raises ContractError unless it is an integer of a useful size."""
    if not is_size(row_align) or not 1 <= row_align <= MOST_ALIGNED:
        expected = f"an integer 1 .. {MOST_ALIGNED}; 1 or 32 are usual"
        raise ContractError("row_align is out of range", got=shown(row_align), expected=expected)
    return wide(row_align)


def wide(size: int) -> int:
    """The same size as an int, if it is none: sums of numpy's small integers overflow. SymInt stays."""
    return size if isinstance(size, (int, torch.SymInt)) else int(size)
