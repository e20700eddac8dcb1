"""What dispatch brings to one rank, in plain torch: the definition that every transport reproduces bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ttnn_moe.contract import Placement
from ttnn_moe.parallel.hierarchical.nodes import rank_masks


def delivered(
    origins: Sequence[tuple[Tensor, Tensor, Tensor]], placement: Placement, rank: int
) -> tuple[Tensor, Tensor, Tensor]:
    """rows [A, H], ids [A, K] of local experts (-1: not here), weights [A, K]: by rank of origin, then token.

    Args:
        origins: hidden [T, H], ids [T, K], weights [T, K] of each rank.
    """
    chosen = [rank_masks(ids, placement) >> rank & 1 == 1 for _, ids, _ in origins]
    rows, ids, weights = (
        torch.cat([one[n][some] for one, some in zip(origins, chosen, strict=True)]) for n in range(3)
    )
    known = (ids >= 0) & (ids < placement.E)
    local = placement.local_of(rank)[ids.clamp(0, placement.E - 1).long()]
    return rows, torch.where(known, local, -1), weights
