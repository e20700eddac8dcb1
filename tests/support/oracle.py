"""The package's oracle under a short name, and the padded view of a routing, by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from ttnn_moe.selfcheck.oracle import oracle

__all__ = ["oracle", "padded_by_hand"]


def padded_by_hand(ids: Tensor, weights: Tensor, E: int) -> list[list[tuple[int, float]]]:
    """For each expert, (token, weight) of each token routed to it; duplicates of a token summed in fp32."""
    rows: list[list[tuple[int, float]]] = [[] for _ in range(E)]
    for t in range(ids.shape[0]):
        for k in range(ids.shape[1]):
            e = int(ids[t, k])
            if not 0 <= e < E:
                continue
            if rows[e] and rows[e][-1][0] == t:
                rows[e][-1] = (t, float(torch.tensor(rows[e][-1][1]) + weights[t, k]))
            else:
                rows[e].append((t, float(weights[t, k])))
    return rows
