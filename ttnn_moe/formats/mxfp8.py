"""MXFP8 activations: an e4m3 number for every channel, a ue8m0 scale for every 32.

Source: the Open Compute Project's Microscaling Formats (MX) specification 1.0; e4m3 is torch.float8_e4m3fn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ContractError
from . import ue8m0
from .dense import DTYPES
from .finite import check_together
from .ue8m0 import GROUP

LARGEST = 448.0
_EXPONENT = 8  # of LARGEST
RULES = ("ocp", "up")
"""Of the scale."""


@torch.no_grad()
def quantise(hidden: Tensor, rule: str = "ocp") -> tuple[Tensor, Tensor]:
    """Values [..., C] float8_e4m3fn and scales [..., C/32] uint8 of hidden [..., C], rounded to nearest, ties to even.

    The 32 channels of a NaN or infinite one have the scale 0xFF, which makes all of them NaN: nothing else is touched.

    Args:
        hidden: bf16, fp16 or fp32.
        rule: "ocp": the scale is 2^(floor(log2(amax)) - 8), and what exceeds 448 of them becomes 448. "up": twice that
            scale where amax would exceed 448 of them, so that no channel saturates.

    Raises:
        ContractError: C is not a multiple of 32, or another dtype or rule.
    """
    check_together(hidden=hidden)
    if hidden.dim() < 1 or hidden.dtype not in DTYPES or not hidden.shape[-1] or hidden.shape[-1] % GROUP:
        raise ContractError(
            "hidden cannot be quantised to mxfp8",
            got=f"{tuple(hidden.shape)} {hidden.dtype}",
            expected="[..., C] bf16, fp16 or fp32, C a multiple of 32",
        )
    if rule not in RULES:
        raise ContractError("unknown rule of the scale", got=repr(rule), expected=f"one of {list(RULES)}")
    groups = hidden.float().unflatten(-1, (-1, GROUP))
    scales = ue8m0.shared(groups, _EXPONENT, LARGEST if rule == "up" else None)
    scaled = groups * ue8m0.reciprocal(scales.clamp_max(ue8m0.NAN - 2))
    values = scaled.nan_to_num(0.0).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return values.flatten(-2), scales[..., 0].to(torch.uint8)


def dequantise(values: Tensor, scales: Tensor) -> Tensor:
    """hidden [..., C] fp32 of values [..., C] float8_e4m3fn and scales [..., C/32] uint8: exact up to 2^128.

    Larger numbers are infinite; `quantise` makes none.

    Raises:
        ContractError: other dtypes, or shapes that do not fit together.
    """
    check_together(values=values, scales=scales)
    fits = values.dim() >= 1 and tuple(scales.shape) == (*values.shape[:-1], values.shape[-1] // GROUP)
    if not fits or values.shape[-1] % GROUP or values.dtype != torch.float8_e4m3fn or scales.dtype != torch.uint8:
        raise ContractError(
            "values and scales do not fit together",
            got=f"{tuple(values.shape)} {values.dtype} and {tuple(scales.shape)} {scales.dtype}",
            expected="[..., C] float8_e4m3fn and [..., C/32] uint8, C a multiple of 32",
        )
    groups = values.float().unflatten(-1, (-1, GROUP))
    return (groups * ue8m0.decode(scales)[..., None]).flatten(-2)
