"""int4_24 layers whose products are exact, and what they are: for the host emulator and for GPUs.

Activations are small integers. A group's product is then an exact integer, which fp32 holds. Its scale, and the sum
over groups in ascending order, are one fused multiply-add each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ttnn_moe import Experts
from ttnn_moe.formats import int4_24


def random_words(E: int, R: int, channels: int, scales: Tensor, device: str = "cpu") -> Tensor:
    """Words [E, channels/64, R, 2] of every q4 and idx2; scales [E, R, channels/32] bf16."""
    values = torch.randint(-8, 8, (E, R, channels // 4))
    index = torch.randint(0, 4, (E, R, channels // 4))
    return int4_24.pack(values, index, scales).to(device)


def powers_of_2(*shape: int, low: int = -1, high: int = 1) -> Tensor:
    """bf16 scales, of both signs."""
    sign = torch.randint(0, 2, shape) * 2 - 1
    return (sign * 2.0 ** torch.randint(low, high + 1, shape)).bfloat16()


def odd_scales(*shape: int) -> Tensor:
    """bf16 scales whose products with an int4 no bf16 holds."""
    return ((torch.randint(64, 128, shape) * 2 + 1) * 2.0**-10).bfloat16()


def exact_experts(E: int, H: int, I: int, order: str = "halves", odd: bool = False) -> Experts:
    """Scales of gate rows make SiLU exact: gates are 0 or beyond +-100. odd: other rows have odd_scales."""
    scales_of = odd_scales if odd else powers_of_2
    gate = powers_of_2(E, I, H // 32, low=8, high=8).abs()
    up, down = scales_of(E, I, H // 32), scales_of(E, H, I // 32)
    both = torch.stack([gate, up], 2).flatten(1, 2) if order == "interleaved" else torch.cat([gate, up], 1)
    return Experts.int4_24(random_words(E, 2 * I, H, both), random_words(E, H, I, down), gate_up_order=order)


def random_int4_24(E: int, H: int, I: int, order: str = "halves") -> Experts:
    """Scales keep the size of what they multiply."""
    w13, w2 = (
        random_words(E, R, channels, (torch.rand(E, R, channels // 32) + 0.5).bfloat16() * (channels * 5) ** -0.5)
        for R, channels in ((2 * I, H), (H, I))
    )
    return Experts.int4_24(w13, w2, gate_up_order=order)


def integers(T: int, H: int) -> Tensor:
    """Activations [T, H] bf16."""
    return torch.randint(-3, 4, (T, H)).bfloat16()


def product(words: Tensor, rows: Tensor) -> Tensor:
    """fp32 [M, R] of words [G2, R, 2] and rows [M, K] of small integers, as the kernels sum: group after group."""
    values, index, scales = int4_24.unpack(words)
    R = len(values)
    integer = torch.zeros(R, values.shape[1], 4, dtype=torch.float64)
    integer.scatter_(2, index.long().unsqueeze(2), values.double().unsqueeze(2))
    groups = integer.view(R, -1, 32)
    c = torch.zeros(len(rows), R, dtype=torch.float64)
    for g in range(groups.shape[1]):
        d = rows[:, 32 * g : 32 * g + 32].double() @ groups[:, g].T
        c = (c + d * scales[:, g].double()).float().double()  # fp64 holds the sum of c and the product
    return c.float()


def gate_and_up(experts: Experts, e: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    both = product(experts.tensors["w13"][e], rows)
    return (both[:, 0::2], both[:, 1::2]) if experts.gate_up_order == "interleaved" else both.chunk(2, 1)


def exact_activations(experts: Experts, e: int, rows: Tensor) -> Tensor:
    """X2 [M, I] bf16 of one expert, where SiLU is exact."""
    gate, up = gate_and_up(experts, e, rows)
    assert bool(((gate == 0) | (gate.abs() > 100)).all())
    return (gate.clamp_min(0) * up).bfloat16()
