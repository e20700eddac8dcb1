"""Levels of 2, 3, 4, 8 or 16 bits to bytes and back, in the order in which tensor-core fragments take them.

A unit is 32 tokens of one head. `mma.m16n8k16` takes keys [16 tokens, 16 channels] and values [16 channels, 16 tokens]
as its A operand. A lane of the warp loads its own fragments of a unit, in words of 32 bits, 16 bytes at a time.

* Pair x = token / 8 * (D / 8) + channel / 8 of a lane is one register: two levels in its halves.
* Keys: lane (token % 8) * 4 + channel % 8 / 2, half channel % 2. Values: tokens and channels swap roles.
* A word holds pairs in fields of both halves. 2 bits: eight pairs at bits 0, 2, .. 14 of a half. 4 bits: four. 8 bits:
  two. 16 bits: one.
* 3 bits: three words hold 16 pairs. Each word has five at bits 0, 3, .. 12. Bit 15 of word i is bit i of the last pair.
  So 64 levels take 24 bytes, and a kernel needs no branch.
* Words lie as [word / V][lane][word % V], where V is the largest power of two that divides D / 32, at most 4.

A field is a denormal fp16 number times a power of two that depends on the channel alone. A kernel needs one AND a pair.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...cuda.attention.tiers import BITS, UNIT
from ...errors import ContractError

LANES = 32


def check_bits(bits: int) -> int:
    """The bits of a tier.

    Raises:
        ContractError: no tier has so many.
    """
    if bits not in BITS:
        raise ContractError("no tier has these bits", got=bits, expected=f"one of {BITS}", remedy="choose other bits")
    return bits


def check_head_dim(D: int) -> int:
    """Channels of a head.

    Raises:
        ContractError: no multiple of 32.
    """
    if D < 32 or D % 32:
        raise ContractError(
            "a bucketed cache does not hold this head_dim",
            got=f"head_dim={D}",
            expected="a multiple of 32",
            remedy="use the cache in bf16",
        )
    return D


def pack(levels: Tensor, bits: int, values: bool) -> Tensor:
    """Bytes of units: levels [..., 32, D], integers from 0 to 2^bits - 1 -> uint8 [..., 32 * D * bits / 8].

    Of another integer the low bits are packed; no neighbour changes.

    Args:
        values: whether they are values; else keys.

    Raises:
        ContractError: other bits or sizes.
    """
    bits, D = check_bits(bits), check_head_dim(levels.shape[-1])
    _check_unit(levels.shape[-2])
    lead = levels.shape[:-2]
    blocks = (levels.to(torch.int64) & 2**bits - 1).reshape(*lead, 4, 8, D // 8, 8)
    # -> [4, D / 8, 8 of a lane's row, 8 of a pair]
    blocks = blocks.movedim(-3, -1) if values else blocks.movedim(-3, -2)
    pairs = blocks.reshape(*lead, D // 2, LANES, 2)
    pairs = pairs[..., 0] | pairs[..., 1] << 16
    words = _words(pairs, bits)
    V = _vector(D)
    words = words.unflatten(-2, (-1, V)).transpose(-1, -2).flatten(-3)
    # two's complement, in 32 bits
    return ((words + 2**31) % 2**32 - 2**31).to(torch.int32).contiguous().view(torch.uint8)


def unpack(packed: Tensor, bits: int, D: int, values: bool) -> Tensor:
    """The inverse of pack: uint8 [..., 32 * D * bits / 8] -> int64 levels [..., 32, D].

    Raises:
        ContractError: other bits or sizes.
    """
    bits, D = check_bits(bits), check_head_dim(D)
    lead, n = packed.shape[:-1], UNIT * D * bits // 8
    if packed.shape[-1] != n:
        raise ContractError("a unit has the wrong size", got=f"{packed.shape[-1]} bytes", expected=f"{n} bytes")
    words = packed.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    words = words.unflatten(-1, (-1, LANES, _vector(D))).transpose(-1, -2).flatten(-3, -2)
    pairs = _pairs(words, bits)
    mask = 2**bits - 1
    pairs = torch.stack((pairs & mask, pairs >> 16 & mask), -1)
    blocks = pairs.reshape(*lead, 4, D // 8, 8, 8)
    blocks = blocks.movedim(-1, -3) if values else blocks.movedim(-2, -3)
    return blocks.reshape(*lead, UNIT, D)


def _vector(D: int) -> int:
    """Words of a lane that lie together."""
    return min(4, D // 32 & -(D // 32))


def _words(pairs: Tensor, bits: int) -> Tensor:
    """[..., X, lanes] -> [..., X * bits / 16, lanes]."""
    if bits != 3:
        fields = pairs.unflatten(-2, (-1, 16 // bits))
        return sum(fields[..., f, :] << bits * f for f in range(16 // bits))  # type: ignore[return-value]
    group = pairs.unflatten(-2, (-1, 16))
    last = group[..., 15, :]
    words = []
    for i in range(3):
        word = (last >> i & 0x00010001) << 15
        for f in range(5):
            word = word | group[..., 5 * i + f, :] << 3 * f
        words.append(word)
    return torch.stack(words, -2).flatten(-3, -2)


def _pairs(words: Tensor, bits: int) -> Tensor:
    """The inverse of _words; other bits of a pair are not cleared."""
    if bits != 3:
        return torch.stack([words >> bits * f for f in range(16 // bits)], -2).flatten(-3, -2)
    group = words.unflatten(-2, (-1, 3))
    fields = [group[..., i, :] >> 3 * f for i in range(3) for f in range(5)]
    last = [(group[..., i, :] >> 15 & 0x00010001) << i for i in range(3)]
    return torch.stack([*fields, last[0] | last[1] | last[2]], -2).flatten(-3, -2)


def _check_unit(n: int) -> None:
    if n != UNIT:
        raise ContractError("a unit has the wrong size", got=f"{n} tokens", expected=f"{UNIT}", remedy="pad it")
