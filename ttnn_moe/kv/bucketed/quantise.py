"""Vectors to levels and a scale each, and back; the Hadamard rotation that makes their channels alike.

Levels are uniform and symmetric: level n stands for (n - (2^bits - 1) / 2) * scale. A rotated vector is nearly
Gaussian, and the best scale of a Gaussian is a known multiple of its root mean square (J. Max, Quantizing for minimum
distortion, 1960). `quantise` tries some scales around it and takes the levels of the least squared
error. The stored scale is a little larger: a quantised vector has the original's projection on the original.

Sums add neighbours first, then pairs of them, and so on; so do rotations of 128 channels. The CUDA C++ kernels, whose
warps add in this order, give the same bits.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .packing import check_bits, check_head_dim

_STEPS = {2: 0.9957, 3: 0.5860, 4: 0.3352}
"""The best step of a Gaussian of variance 1."""

_AROUND = (0.7, 0.8, 0.9, 1.0, 1.1, 1.25)
SUMS_IN_ORDER = 128
"""Channels of the heads that CUDA C++ kernels rotate. Other sizes take a product by the matrix, which is one kernel."""

LEAST, MOST = 2.0**-14, 65504.0
"""Of a scale: normal fp16 numbers. NaN stays NaN."""


def half_of(bits: int) -> float:
    """What is subtracted from a level."""
    return (2**bits - 1) / 2


def quantise(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Levels and scales of vectors x [..., D]: int64 [..., D], fp16 [...].

    16 bits: levels are the bits of bf16, scales are 1. Fewer: a vector with NaN or an infinity gets the scale NaN.

    Raises:
        ContractError: no tier has these bits.
    """
    check_bits(bits)
    if bits == 16:
        levels = x.to(torch.bfloat16).view(torch.int16).to(torch.int64) & 0xFFFF
        return levels, torch.ones(x.shape[:-1], dtype=torch.float16, device=x.device)
    x = x.float()
    half = half_of(bits)
    most = x.abs().amax(-1)
    candidates = [most * (1 / half)]
    if bits in _STEPS:
        rms = (_sum(x.square()) * (1 / x.shape[-1])).sqrt()
        candidates += [rms * (_STEPS[bits] * by) for by in _AROUND]
    best = error = None
    for candidate in candidates:
        scale = _stored(candidate)
        left = _sum((_levels(x, scale, half) - half).mul_(scale.float()[..., None]).sub_(x).square_())
        if best is None or error is None:
            best, error = scale, left
        else:
            better = left < error
            best, error = torch.where(better, scale, best), torch.where(better, left, error)
    assert best is not None
    best = torch.where(most < float("inf"), best, torch.full_like(best, float("nan")))
    levels = _levels(x, best, half)
    if bits in _STEPS:
        best = _unbiased(x, levels - half, best)
    return levels.to(torch.int64), best


def _unbiased(x: Tensor, left: Tensor, scale: Tensor) -> Tensor:
    """The scale [...] with which levels `left` [..., D] have the projection on x that x has: their product is |x|^2.

    The scale of the least error shortens a vector, by an eighth at 2 bits. Shorter keys lose attention to the keys of
    other tiers.
    """
    wanted = _sum(x.square()) / _sum(x * left)
    return torch.where((wanted > 0) & (wanted < MOST), _stored(wanted), scale)


def dequantise(levels: Tensor, scale: Tensor, bits: int) -> Tensor:
    """fp32 vectors of levels [..., D] and scales [...].

    Raises:
        ContractError: no tier has these bits.
    """
    check_bits(bits)
    if bits == 16:
        return (levels << 16).to(torch.int32).view(torch.float32) if levels.numel() else levels.float()
    return (levels.float() - half_of(bits)) * scale.float()[..., None]


def rotate(x: Tensor, in_order: bool = True) -> Tensor:
    """x [..., D] times an orthonormal, symmetric Hadamard matrix, so rotate(rotate(x)) is x. D: a multiple of 32.

    The matrix has blocks of the largest power of two that divides D. Rotated queries meet rotated keys in the same
    scores. Attention to rotated values is rotated: rotate it back.

    Args:
        in_order: add as the kernels do, for the same bits. False: one product, which is one launch.

    Raises:
        ContractError: D is no multiple of 32.
    """
    D = check_head_dim(x.shape[-1])
    B = D & -D
    if D != SUMS_IN_ORDER or not in_order:
        return (x.unflatten(-1, (D // B, B)) @ _hadamard(B, x.dtype, x.device)).flatten(-2)
    turned, step = x if x.dtype == torch.float64 else x.float(), 1
    while step < B:
        a, b = turned.unflatten(-1, (-1, 2, step)).unbind(-2)
        turned = torch.stack((a + b, a - b), -2).flatten(-3)
        step *= 2
    return (turned * B**-0.5).to(x.dtype)


@lru_cache(maxsize=32)
@torch.inference_mode(False)  # what is kept also serves calls that record gradients
def _hadamard(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The Hadamard matrix [n, n] of Sylvester, divided by sqrt(n). n: a power of two."""
    one = torch.ones(1, 1, dtype=torch.float64)
    while len(one) < n:
        one = torch.cat((torch.cat((one, one), 1), torch.cat((one, -one), 1)), 0)
    return (one / n**0.5).to(dtype).to(device)


def _sum(x: Tensor) -> Tensor:
    """The sum over the last dimension: neighbours first."""
    while x.shape[-1] % 2 == 0:
        x = x[..., ::2] + x[..., 1::2]
    return x.sum(-1)


def _stored(scale: Tensor) -> Tensor:
    return scale.clamp(LEAST, MOST).half()


def _levels(x: Tensor, scale: Tensor, half: float) -> Tensor:
    levels = (x / scale.float()[..., None] + half).round_().clamp_(0, 2 * half)
    return levels.nan_to_num_(0.0)
