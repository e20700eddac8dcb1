"""Combine's sum in plain torch: the definition that every transport reproduces bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .nodes import Nodes


def tree_sum(
    rows: Tensor,
    masks: Tensor,
    nodes: Nodes,
    rank: int,
    wire_dtype: torch.dtype = torch.bfloat16,
    biases: Sequence[Tensor | None] = (),
    dtype: torch.dtype | None = None,
) -> Tensor:
    """[T, H] of one rank: fp32 sums in ascending local rank, then ascending node; biases; one rounding to dtype.

    A row that another rank sends, and a partial that another node sends, is rounded to wire_dtype once.

    Args:
        rows: [R, T, H]; row t of rank r counts where bit r of masks[t] is set, and is not read elsewhere.
        masks: [T] int64. rank: whose tokens these are. dtype: default that of rows.
    """
    R, T, H = rows.shape
    node, local = nodes.place(rank)

    def hop(value: Tensor, crosses: bool) -> Tensor:
        return value.to(wire_dtype).float() if crosses else value

    def add(total: Tensor, some: Tensor, value: Tensor, has: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.where(some[:, None], total + value, value)
        return torch.where(has[:, None], both, total), some | has

    def nothing() -> tuple[Tensor, Tensor]:
        return rows.new_zeros(T, H, dtype=torch.float32), torch.zeros(T, dtype=torch.bool, device=rows.device)

    total, some = nothing()
    for n in range(nodes.inter):
        part, any_here = nothing()
        for la in range(nodes.intra):
            r = nodes.rank(n, la)
            part, any_here = add(part, any_here, hop(rows[r].float(), la != local), masks >> r & 1 == 1)
        total, some = add(total, some, hop(part, n != node), any_here)
    for bias in biases:
        if bias is not None:
            total = total + bias.float()
    return total.to(dtype or rows.dtype)
