"""The brute-force oracle: fp64, or fp32 with the roundings that a backend declares. Shares no code with a backend."""

from __future__ import annotations

import torch
from torch import Tensor

from ..backend import Numerics
from ..contract import Experts
from ..formats import mxfp4, mxfp8, quantise_mxfp4


def oracle(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: Experts,
    numerics: Numerics | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """out[t] = (out[t] +) sum over k of w[t,k] * (silu(x[t] Wg_e) * (x[t] Wu_e)) Wd_e, one expert after the other.

    Biases are added to each product; clamped_swiglu stands in for silu(gate) * up where the experts have it.

    Args:
        hidden: [T, H], any dtype, on the device of the experts: the oracle computes there.
        ids: [T, K] integers; any value outside 0 .. E-1 names no expert. weights: [T, K]. On any device.
        experts: of any format; its logical weights are used.
        numerics: None computes in fp64 throughout; else each expert in fp32 with those roundings.
        out: [T, H] to add to.

    Returns:
        [T, H] fp64 on the device of hidden. Sums over k are fp64.
    """
    kind = torch.float64 if numerics is None else torch.float32
    rounding = numerics or Numerics()
    device = hidden.device
    ids, weights = ids.to(device), weights.to(device)
    if out is None:
        total = torch.zeros(hidden.shape, dtype=torch.float64, device=device)
    else:
        total = out.to(device, torch.float64, copy=True)
    for e in range(experts.E):
        t, k = (ids == e).nonzero(as_tuple=True)
        if not len(t):
            continue
        gate_up, down = (w.to(kind) for w in experts.dequantize(e))
        biases = experts.biases(e)
        gate_up_bias, down_bias = (0, 0) if biases is None else (bias.to(kind) for bias in biases)
        both = _round(_as_operand(hidden[t], rounding).to(kind) @ gate_up.T + gate_up_bias, rounding.gate_up)
        gate, up = both[:, : experts.I], both[:, experts.I :]
        if experts.activation == "clamped_swiglu":
            gate, up = torch.where(gate > 7, 7, gate), torch.where(up > 7, 7, torch.where(up < -7, -7, up)) + 1
            gate = _round(gate / (1 + torch.exp(-1.702 * gate)), rounding.silu)
        else:
            gate = _round(gate / (1 + torch.exp(-gate)), rounding.silu)
        act = _round(gate * up, rounding.activation)
        y = _round(_as_operand(act, rounding) @ down.T + down_bias, rounding.expert_out)
        w = _round(weights[t, k].to(kind), rounding.routing_weight)
        total.index_add_(0, t, _round(w[:, None] * y, rounding.weighted).double())
    return total


def _round(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None else x.to(dtype).to(x.dtype)


def _as_operand(x: Tensor, rounding: Numerics) -> Tensor:
    """What the product multiplies."""
    if rounding.operands is None:
        return x
    if rounding.operands == mxfp4.NAME:
        finite = x.isfinite().unflatten(1, (-1, 32)).all(2).repeat_interleave(32, 1)
        return mxfp4.dequantise(*quantise_mxfp4.quantise(x.where(finite, 0), "ocp")).where(finite, torch.nan)
    return mxfp8.dequantise(*mxfp8.quantise(x, "up"))
