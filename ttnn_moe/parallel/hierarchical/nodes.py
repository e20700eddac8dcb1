"""Ranks as nodes of equally many: rank = node * R_intra + local."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...arguments import is_size
from ...contract import Placement, Routing
from ...errors import ContractError

MOST = 8
"""Nodes, and ranks of a node, at most: the masks of 64 ranks are int64."""


@dataclass(frozen=True)
class Nodes:
    """R_inter nodes of R_intra ranks each.

    Raises:
        ContractError: no integer, or one outside 1 .. 8.
    """

    inter: int
    intra: int

    def __post_init__(self) -> None:
        if not (is_size(self.inter) and is_size(self.intra)):
            got = f"R_inter={self.inter}, R_intra={self.intra}"
            raise ContractError("numbers of ranks are no integers", got=got, expected="two int")
        if not (1 <= self.inter <= MOST and 1 <= self.intra <= MOST):
            raise ContractError(
                "unsupported topology", got=f"R_inter={self.inter}, R_intra={self.intra}", expected=f"1 .. {MOST} each"
            )

    @property
    def R(self) -> int:
        """Ranks of all nodes."""
        return self.inter * self.intra

    def rank(self, node: int, local: int) -> int:
        """Number of the rank with this local index in this node."""
        return node * self.intra + local

    def place(self, rank: int) -> tuple[int, int]:
        """(node, local) of a rank."""
        return divmod(rank, self.intra)


def ids_of(ids: Tensor, placement: Placement) -> Tensor:
    """[T, K] int32: the same ids, -1 for those outside 0 .. E-1."""
    weights = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
    return Routing.from_topk(ids, weights, placement.E).ids


def rank_masks(ids: Tensor, placement: Placement) -> Tensor:
    """[T] int64: bit r of token t says that rank r holds one of its experts. ids outside 0 .. E-1 count for nothing.

    Args:
        ids: [T, K] int32 or int64.
    """
    inside = ids_of(ids, placement)
    owner = placement.device_of.to(ids.device)[inside.clamp_min(0).long()].long()
    bits = torch.where(inside < 0, 0, torch.ones_like(owner) << owner)
    masks = torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
    for k in range(ids.shape[1]):
        masks |= bits[:, k]
    return masks
