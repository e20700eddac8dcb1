"""What the kernels that tune_triton.py times must give: a product, the sort, the weighted sum; plain torch, fp64."""

from __future__ import annotations

import torch
from torch import Tensor

from ttnn_moe import Experts, Routing
from ttnn_moe.cuda.moe.triton_launch import SortedRows


def products(product: str, hidden: Tensor, act: Tensor, routing: Routing, inverse: Tensor, experts: Experts) -> Tensor:
    """One product of every pair, by sorted row: [T * K, I] of "gate_up" (silu(x Wg) * (x Wu)), [T * K, H] of "down".

    Args:
        hidden: [T, H], what gate_up multiplies. act: [T * K, I] by sorted row, what down multiplies.
        inverse: the sorted row of each pair; the sort is checked apart.
    """
    rows = inverse[: routing.T * routing.K].view(routing.T, routing.K).long()
    out = torch.empty(rows.numel(), experts.I if product == "gate_up" else experts.H, device=hidden.device)
    for e in range(experts.E):
        t, k = (routing.topk_ids == e).nonzero(as_tuple=True)
        gate_up, down = (w.double() for w in experts.dequantize(e))
        at = rows[t, k]
        if product == "down":
            out[at] = (act[at].double() @ down.T).float()
            continue
        gate, up = (hidden[t].double() @ gate_up.T).chunk(2, 1)
        out[at] = (torch.nn.functional.silu(gate) * up).float()
    return out


def combined(expert_out: Tensor, inverse: Tensor, routing: Routing) -> Tensor:
    """[T, H] fp64: the weighted sum of each token's rows."""
    rows = inverse[: routing.T * routing.K].view(routing.T, routing.K).long()
    total = torch.zeros(routing.T, expert_out.shape[1], dtype=torch.float64, device=expert_out.device)
    for k in range(routing.K):
        total += routing.topk_weights[:, k, None].double() * expert_out[rows[:, k]].double()
    return total


def sort_is_wrong(routing: Routing, found: SortedRows, m: int) -> str | None:
    """The first tensor that is not a stable sort of the pairs by expert, in tiles of m rows; None: all are right."""
    ids = routing.topk_ids.flatten().long()
    P, E = len(ids), routing.E
    order = ids.argsort(stable=True)
    counts = ids.bincount(minlength=E)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    tiles = [[e, first] for e in range(E) for first in range(int(offsets[e]), int(offsets[e + 1]), m)]
    for name, want in (
        ("offsets", offsets),
        ("row_tokens", order // routing.K),
        ("inverse", order.argsort()),
        ("num_tiles", torch.tensor([len(tiles)])),
        ("tiles", torch.tensor(tiles).flatten()),
    ):
        if getattr(found, name).flatten()[: len(want)].tolist() != want.tolist():
            return name
    assert P == int(offsets[-1])
    return None
