"""MXFP4 experts: an e2m1 number for every channel, a ue8m0 scale for every 32. 4.25 bits a weight.

| tensor | shape | rows R | channels C |
|---|---|---|---|
| gate_up_blocks, gate_up_scales | [E, 2I, H/2] and [E, 2I, H/32] uint8 | gate and up rows, in gate_up_order | H |
| down_blocks, down_scales | [E, H, I/2] and [E, H, I/32] uint8 | outputs | I |
| gate_up_bias | [E, 2I] bf16 or fp32 | gate and up rows, in gate_up_order | |
| down_bias | [E, H], the dtype of gate_up_bias | outputs | |

Biases are there both, or neither.

Byte i of a row of blocks holds channel 2i in its low four bits and channel 2i + 1 in its high four bits. Of these four
bits, bit 3 is the sign; bits 0 .. 2 are 0, 0.5, 1, 1.5, 2, 3, 4 and 6. Byte g of a row of scales scales the channels
from 32 * g on: by 2^(byte - 127), and 0xFF is NaN.

gpt-oss stores the same bytes, as blocks [E, R, C/32, 16]. Source: the Open Compute Project's Microscaling Formats (MX)
specification 1.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ContractError
from ..memory import check_tensors
from . import ue8m0
from .finite import check_readable, check_together, comparable
from .format import ExpertWeights, check_sizes, select_experts
from .ue8m0 import GROUP

NAME = "mxfp4"
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of e2m1, by its low three bits."""
TENSORS = ("gate_up_blocks", "gate_up_scales", "down_blocks", "down_scales")
BIASES = ("gate_up_bias", "down_bias")
BIAS_DTYPES = (torch.bfloat16, torch.float32)
_BLOCK = 1 << 21  # bytes decoded at a time


def pack(codes: Tensor) -> Tensor:
    """Blocks [..., C/2] uint8 of codes [..., C], integers 0 .. 15: the bits of e2m1 numbers.

    Raises:
        ContractError: C is odd, or codes are no integers 0 .. 15.
    """
    check_readable(codes=codes)
    if codes.dim() < 1 or codes.shape[-1] % 2 or not codes.shape[-1]:
        raise ContractError("codes cannot be packed", got=tuple(codes.shape), expected="[..., C], C even")
    no_integers = codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool
    if no_integers or bool((((wide := comparable(codes)) < 0) | (wide > 15)).any()):
        raise ContractError("codes are out of range", got=codes.dtype, expected="integers 0 .. 15")
    codes = codes.to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(blocks: Tensor) -> Tensor:
    """The inverse of `pack`: codes [..., C] uint8 of blocks [..., C/2].

    Raises:
        ContractError: blocks are not uint8.
    """
    check_bytes("blocks", blocks)
    check_together(blocks=blocks)
    if not blocks.dim():
        raise ContractError("blocks have the wrong shape", got="[]", expected="[..., C/2]")
    return torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)


def dequantise(blocks: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logical weights [..., R, C] of blocks [..., R, C/2] and scales [..., R, C/32].

    dtype: torch.float64 is exact for every byte and scale. So is torch.float32, but that 2^128 and more are infinite:
    `quantise_mxfp4` makes no such weight. The 32 channels of the scale 0xFF are NaN.

    Raises:
        ContractError: other dtypes, or shapes that do not fit together.
    """
    check_together(blocks=blocks, scales=scales)
    check_pair("blocks", blocks, "scales", scales)
    if dtype not in (torch.float32, torch.float64):
        raise ContractError("no such dtype to dequantise to", got=dtype, expected="torch.float32 or torch.float64")
    rows, groups = blocks.reshape(-1, blocks.shape[-1]), scales.reshape(-1, scales.shape[-1])
    weights = torch.empty(len(rows), 2 * blocks.shape[-1], dtype=dtype, device=blocks.device)
    block = max(1, _BLOCK // blocks.shape[-1])
    if dtype == torch.float32:
        decoder = Decoder(min(block, len(rows)) * 2 * blocks.shape[-1], blocks.device)
        for start in range(0, len(rows), block):
            end = start + block
            weights[start:end] = decoder.decode(rows[start:end], groups[start:end])
    else:
        pairs = _pairs().to(dtype).to(blocks.device)
        for start in range(0, len(rows), block):
            part = pairs[rows[start : start + block].int()].unflatten(1, (-1, GROUP // 2)).flatten(-2)
            part *= ue8m0.decode(groups[start : start + block], dtype)[..., None]
            weights[start : start + block] = part.flatten(1)
    return weights.view(*blocks.shape[:-1], 2 * blocks.shape[-1])


class Decoder:
    """Decodes up to `weights` weights at a time to fp32, in memory of its own: a call allocates nothing.

    One look-up gives the two channels of a byte, as one number of 64 bits.
    """

    def __init__(self, weights: int, device: torch.device | str = "cpu"):
        self._pairs = _pairs().to(device).view(torch.float64)[:, 0]
        self._values = ue8m0.table(device)
        self._codes = torch.empty(weights // 2, dtype=torch.int32, device=device)
        self._bytes = torch.empty(weights // GROUP, dtype=torch.int32, device=device)
        self._scales = torch.empty(weights // GROUP, dtype=torch.float32, device=device)
        self._weights = torch.empty(weights // 2, dtype=torch.float64, device=device)

    def decode(self, blocks: Tensor, scales: Tensor) -> Tensor:
        """Blocks [R, C/2] and scales [R, C/32], of any strides -> weights [R, C] fp32, until the next call."""
        n, groups = blocks.numel(), scales.numel()
        codes, index = self._codes[:n], self._bytes[:groups]
        codes.view(blocks.shape).copy_(blocks)
        index.view(scales.shape).copy_(scales)
        weights = torch.index_select(self._pairs, 0, codes, out=self._weights[:n]).view(torch.float32)
        factors = torch.index_select(self._values, 0, index, out=self._scales[:groups])
        return weights.view(groups, GROUP).mul_(factors[:, None]).view(len(blocks), 2 * blocks.shape[1])


def magnitudes(device: torch.device | str) -> Tensor:
    """[8] fp32: MAGNITUDES."""
    return torch.tensor(MAGNITUDES, dtype=torch.float32, device=device)


def _pairs() -> Tensor:
    """[256, 2] fp32: the two channels of each byte, without their scale."""
    codes = unpack(torch.arange(256, dtype=torch.uint8, device="cpu")[:, None]).int()
    values = magnitudes("cpu")[codes & 7]
    return torch.where(codes > 7, -values, values)


class Mxfp4Format:
    """See the module's docstring. Bytes are read as they lie."""

    name = NAME
    multiple = GROUP

    def check(self, experts: ExpertWeights) -> None:
        """Names, sizes, shapes and dtypes; `check_scales` reads the values."""
        if set(experts.tensors) not in (set(TENSORS), {*TENSORS, *BIASES}):
            raise ContractError(
                f"{NAME} experts need exactly four tensors, or six with biases",
                got=sorted(experts.tensors),
                expected=f"{sorted(TENSORS)}, or also {sorted(BIASES)}",
            )
        E, H, I = experts.E, experts.H, experts.I
        check_sizes(self, H, I)
        shapes: dict[str, tuple[tuple[int, ...], str]] = {
            "gate_up_blocks": ((E, 2 * I, H // 2), "[E, 2I, H/2]"),
            "gate_up_scales": ((E, 2 * I, H // GROUP), "[E, 2I, H/32]"),
            "down_blocks": ((E, H, I // 2), "[E, H, I/2]"),
            "down_scales": ((E, H, I // GROUP), "[E, H, I/32]"),
            "gate_up_bias": ((E, 2 * I), "[E, 2I]"),
            "down_bias": ((E, H), "[E, H]"),
        }
        for name, tensor in experts.tensors.items():
            shape, form = shapes[name]
            if name in TENSORS:
                check_bytes(name, tensor)
            elif tensor.dtype not in BIAS_DTYPES or tensor.dtype != experts.tensors[BIASES[0]].dtype:
                raise ContractError(
                    f"{name} has the wrong dtype",
                    got=tensor.dtype,
                    expected="torch.bfloat16 or torch.float32, the same for both biases",
                )
            if tuple(tensor.shape) != shape:
                raise ContractError(
                    f"{name} has the wrong shape", got=tuple(tensor.shape), expected=f"{shape} ({form})"
                )
            if not tensor.is_contiguous():
                raise ContractError(
                    f"{name} is not contiguous",
                    got=f"strides {tensor.stride()}",
                    expected=f"row-major {shape}",
                    remedy="lay the bytes out once, at load: .contiguous()",
                )
        devices = {str(tensor.device) for tensor in experts.tensors.values()}
        if len(devices) > 1:
            raise ContractError(f"{NAME} tensors are apart", got=" and ".join(sorted(devices)), expected="one device")

    def dequantize(self, experts: ExpertWeights, e: int) -> tuple[Tensor, Tensor]:
        gate_up, down = (
            dequantise(experts.tensors[f"{name}_blocks"][e], experts.tensors[f"{name}_scales"][e])
            for name in ("gate_up", "down")
        )
        if experts.gate_up_order == "interleaved":
            gate_up = torch.cat([gate_up[0::2], gate_up[1::2]])
        return gate_up, down

    def select(self, experts: ExpertWeights, index: Tensor) -> dict[str, Tensor]:
        return select_experts(experts.tensors, index)


def check_bytes(name: str, tensor: Tensor) -> None:
    """Raise ContractError unless it is a tensor of uint8."""
    check_tensors(**{name: tensor})
    if tensor.dtype != torch.uint8:
        raise ContractError(
            f"{name} has the wrong dtype",
            got=tensor.dtype,
            expected="torch.uint8",
            remedy=f"{name}.view(torch.uint8)" if tensor.dtype.itemsize == 1 else None,
        )


def check_pair(name: str, blocks: Tensor, other: str, scales: Tensor) -> None:
    """Raise ContractError unless blocks [..., R, C/2] and scales [..., R, C/32] are uint8, of one C and one R."""
    check_bytes(name, blocks)
    check_bytes(other, scales)
    *lead, half = blocks.shape if blocks.dim() else (0,)
    if blocks.dim() < 2 or not half or half % (GROUP // 2) or tuple(scales.shape) != (*lead, half // (GROUP // 2)):
        raise ContractError(
            f"{name} and {other} do not fit together",
            got=f"{tuple(blocks.shape)} and {tuple(scales.shape)}",
            expected="[..., R, C/2] and [..., R, C/32], C a multiple of 32",
        )


def check_scales(**tensors: Tensor) -> None:
    """Raise ContractError if a byte of these scales [E, R, C/32] is 0xFF, NaN, naming the first.

    It reads all scales once, and synchronises with a GPU.
    """
    for name, scales in tensors.items():
        if scales.is_meta:
            continue
        bad = torch.stack([(expert == ue8m0.NAN).any() for expert in scales])
        if not bool(bad.any()):
            continue
        e = int(bad.nonzero()[0])
        r, group = (scales[e] == ue8m0.NAN).nonzero()[0].tolist()
        first = GROUP * group
        raise ContractError(
            f"{name} has a scale that is NaN",
            got=f"0xFF for expert {e}, row {r}, group {group} (channels {first} to {first + GROUP - 1})",
            expected="0x00 .. 0xFE",
            remedy="make the tensors again from the original weights",
        )
