"""MXFP4 blocks and scales from weights: round to nearest, ties to even, on the e2m1 grid.

The scale of 32 channels, whose largest magnitude is amax, follows one of two rules:

| rule | scale |
|---|---|
| ocp | 2^(floor(log2(amax)) - 2), as the OCP MX specification 1.0 has it: amax becomes 4 up to 8, and 6 above 5 |
| error | of that scale, its half and its double, the one of least squared error |

No other power of two has a smaller error. What larger scales can make of 32 such channels, the double can make too.
At a quarter, amax alone loses more than the first scale can cost the other 31 channels.

No weight becomes infinite in fp32: the scale is at most 2^125.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract import check_kind
from ..errors import ContractError
from ..experts import Experts
from . import ue8m0
from .dense import DTYPES
from .finite import check_finite, check_readable
from .mxfp4 import NAME, magnitudes, pack
from .ue8m0 import GROUP

MAX_ELEMENTS = 1 << 20
"""Of weights worked on at a time: each temporary holds 4 bytes of each."""
RULES = ("error", "ocp")
"""Of the scale."""
# codes rise above these: between two neighbours is the middle, and a tie goes to the even code
_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_EXPONENT = 2  # of 6, the largest number
_LARGEST = 254 - _EXPONENT  # byte of a scale


@torch.no_grad()
def quantise(weights: Tensor, rule: str = "error") -> tuple[Tensor, Tensor]:
    """Blocks [..., R, C/2] and scales [..., R, C/32] uint8 of weights [..., R, C], C channels of R rows.

    Args:
        weights: bf16, fp16 or fp32. rule: of the scale; one of RULES.

    Raises:
        ContractError: C is not a multiple of 32, another dtype or rule, or a weight that is not finite.
    """
    check_readable(weights=weights)
    if weights.dim() < 2 or weights.dtype not in DTYPES or not weights.shape[-1] or weights.shape[-1] % GROUP:
        raise ContractError(
            f"weights cannot be quantised to {NAME}",
            got=f"{tuple(weights.shape)} {weights.dtype}",
            expected="[..., R, C] bf16, fp16 or fp32, C a multiple of 32",
        )
    if rule not in RULES:
        raise ContractError("unknown rule of the scale", got=repr(rule), expected=f"one of {list(RULES)}")
    *lead, R, C = weights.shape
    blocks = torch.empty(*lead, R, C // 2, dtype=torch.uint8, device=weights.device)
    scales = torch.empty(*lead, R, C // GROUP, dtype=torch.uint8, device=weights.device)
    if not blocks.numel():
        return blocks, scales
    check_finite(NAME, "weights", weights.reshape(-1, R, C))
    rows = max(1, MAX_ELEMENTS // C)
    parts = zip(*(t.reshape(-1, t.shape[-1]).split(rows) for t in (weights, blocks, scales)), strict=True)
    for part, codes, factors in parts:
        groups = part.float().reshape(-1, GROUP)
        chosen = ue8m0.shared(groups, _EXPONENT)
        if rule == "error":
            chosen = _least_error(groups, chosen)
        codes.copy_(pack(_codes(groups * ue8m0.reciprocal(chosen)).view(len(part), C)))
        factors.copy_(chosen.view(len(part), -1))
    return blocks, scales


@torch.no_grad()
def quantise_experts(experts: Experts, rule: str = "error") -> Experts:
    """A layer's dense experts in MXFP4, their gate and up rows in the same order; H and I multiples of 32.

    Raises:
        ContractError: as `quantise`; or experts of another format.
    """
    check_kind(experts, Experts)
    if experts.format != "dense":
        raise ContractError("only dense experts can be quantised", got=experts.format, expected="dense")
    check_readable(**experts.tensors)
    for name, tensor in experts.tensors.items():
        check_finite(NAME, name, tensor)
    gate_up, down = (quantise(experts.tensors[name], rule) for name in ("gate_up", "down"))
    return Experts.mxfp4(*gate_up, *down, gate_up_order=experts.gate_up_order)


def _codes(values: Tensor) -> Tensor:
    """The e2m1 codes uint8 nearest to values fp32; -0 keeps its sign, and what is above 6 becomes 6."""
    middles = torch.tensor(_MIDDLES, dtype=torch.float32, device=values.device)
    # a middle below an even code belongs to that code
    middles[1::2] = torch.nextafter(middles[1::2], torch.zeros_like(middles[1::2]))
    codes = torch.bucketize(values.abs(), middles, out_int32=True)
    return codes.add_(values.signbit(), alpha=8).to(torch.uint8)


def _least_error(groups: Tensor, scales: Tensor) -> Tensor:
    """[n, 1] int32: of the bytes of scales [n, 1], and those next to them, the one of least squared error."""
    unit = (groups * ue8m0.reciprocal(scales)).abs()  # below 8: squares cannot overflow
    grid = magnitudes(groups.device)
    best, least = scales, torch.full_like(unit[:, :1], torch.inf)
    for step in (0, 1, -1):
        at = (scales + step).clamp(0, _LARGEST)
        size = ue8m0.reciprocal(127 + scales - at)
        rounded = grid[_codes(unit / size).int()] * size
        error = (unit - rounded).square_().sum(-1, keepdim=True)
        best, least = torch.where(error < least, at, best), torch.minimum(error, least)
    return best
