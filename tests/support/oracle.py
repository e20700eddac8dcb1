"""The brute-force oracle: fp64, or fp32 with the roundings that a backend declares. Shares no code with a backend."""

from __future__ import annotations

import torch
from torch import Tensor

from ttnn_moe import Experts
from ttnn_moe.backend import Numerics


def oracle(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Experts,
    numerics: Numerics | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """out[t] = (out[t] +) sum over ascending k of w[t,k] * (silu(x[t] Wg_e) * (x[t] Wu_e)) Wd_e.

    Args:
        hidden [T, H], ids [T, K] (any value outside 0 .. E-1 names no expert), weights [T, K]: on the CPU.
        numerics: None computes in fp64 throughout; else in fp32 with those roundings.
        out: [T, H] to add to.

    Returns:
        [T, H] fp64 (fp32 values with numerics).
    """
    T, K = ids.shape
    kind = torch.float64 if numerics is None else torch.float32
    rounding = numerics or Numerics()
    pair = torch.zeros(T, K, hidden.shape[1], dtype=kind)
    x = hidden.to(kind)
    for e in range(experts.E):
        rows = [(t, k) for t in range(T) for k in range(K) if int(ids[t, k]) == e]
        if not rows:
            continue
        t, k = torch.tensor(rows).T
        gate_up, down = (w.to(kind) for w in experts.dequantize(e))
        both = _round(x[t] @ gate_up.T, rounding.gate_up)
        gate, up = both[:, : experts.I], both[:, experts.I :]
        gate = _round(gate / (1 + torch.exp(-gate)), rounding.silu)
        act = _round(gate * up, rounding.activation)
        y = _round(act @ down.T, rounding.expert_out)
        pair[t, k] = _round(_round(weights[t, k].to(kind), rounding.routing_weight)[:, None] * y, rounding.weighted)
    total = torch.zeros(T, hidden.shape[1], dtype=kind) if out is None else out.to(kind).clone()
    for k in range(K):
        total = total + pair[:, k]
    return total.double()


def _round(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None else x.to(dtype).to(x.dtype)


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
