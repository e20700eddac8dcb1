"""ue8m0 scales: a byte b is 2^(b - 127), and 0xFF is NaN. One scale serves 32 channels.

The block scale of the Open Compute Project's Microscaling Formats (MX) specification 1.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
"""Channels that share a scale."""
NAN = 0xFF
_MANTISSA = (1 << 23) - 1


def decode(scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of scales [...] uint8, exact: fp32 holds all of them, 2^-127 as a subnormal number."""
    return table(scales.device, dtype)[scales.int()]


def table(device: torch.device | str, dtype: torch.dtype = torch.float32) -> Tensor:
    """[256]: the value of each byte; no arithmetic makes them, so that subnormal numbers stay."""
    values = (torch.arange(256, dtype=torch.int32, device="cpu") << 23).view(torch.float32)
    values[0], values[NAN] = 2.0**-127, torch.nan
    return values.to(dtype).to(device)


def shared(values: Tensor, exponent: int, largest: float | None = None) -> Tensor:
    """[..., 1] int32: the byte of the scale that values [..., n] fp32 share.

    The scale is 2^(floor(log2(amax)) - exponent), no less than 2^-127 and no more than 2^(127 - exponent), which keeps
    all elements finite in fp32; 0xFF where a value is NaN or infinite.

    Args:
        exponent: of the element format's largest number. largest: that number; the scale is then doubled where amax
            exceeds scale * largest, so that no element saturates.
    """
    bits = values.abs().amax(-1, keepdim=True).view(torch.int32)
    found = (bits >> 23) - exponent
    if largest is not None:
        full = int(torch.tensor(largest, dtype=torch.float32, device="cpu").view(torch.int32)) & _MANTISSA
        found += (bits & _MANTISSA) > full
    return torch.where(bits >> 23 == NAN, NAN, found.clamp(0, 254 - exponent))


def reciprocal(scales: Tensor) -> Tensor:
    """1 / scale in fp32 of bytes [...] int32, 0 .. 253: exact."""
    return ((2 * 127 - scales) << 23).view(torch.float32)
