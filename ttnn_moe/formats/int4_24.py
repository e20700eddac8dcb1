"""2:4-sparse int4 experts: one int4 of every four channels, a bf16 scale for every 32. 2 bits a weight.

| tensor | shape | rows R | channels |
|---|---|---|---|
| w13 | [E, H/64, 2I, 2] int64 | gate and up rows, in gate_up_order | H |
| w2 | [E, I/64, H, 2] int64 | outputs | I |

word[e, g2, r, half] holds the 32 channels of row r from 64 * g2 + 32 * half on:

| bits | hold |
|---|---|
| 0 .. 31 | 8 x q4: the kept weight of channels 4i .. 4i+3 is (q4 - 8) * scale; q4 i lies at bit 4i |
| 32 .. 47 | 8 x idx2: which of the four channels is kept, pair * 2 + slot; idx2 i lies at bit 32 + 2i |
| 48 .. 63 | scale: the bits of a bf16 |

The other three channels are zero. The pair says which nibble of ordered 2:4 metadata the chunk has: 0x4 keeps channels
(0, 1), 0xE keeps (2, 3). The slot says which of the two is the kept weight; the tensor cores get a zero for the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ContractError
from ..memory import check_tensors
from ..watched import watcher
from .finite import check_readable, check_together, comparable, is_float8
from .format import ExpertWeights, check_silu, check_sizes, select_experts

NAME = "int4_24"
GROUP = 32
"""Channels that share a scale: those of one word."""
_BLOCK = 1 << 18  # words decoded at a time
_INFINITE = 0x7F80 << 48  # the exponent of the scale, all ones: infinite or NaN


def pack(values: Tensor, index: Tensor, scales: Tensor) -> Tensor:
    """Words [..., C/64, R, 2] int64 of C channels.

    Args:
        values: [..., R, C/4] integers -8 .. 7, one of every four channels.
        index: [..., R, C/4] integers 0 .. 3: the channel among its four.
        scales: [..., R, C/32] bf16; their bits are kept.

    Raises:
        ContractError: shapes, dtypes or values that do not fit.
    """
    check_readable(values=values, index=index, scales=scales)
    *lead, R, chunks = values.shape if values.dim() >= 2 else (0, 0)
    if index.shape != values.shape or scales.shape != (*lead, R, chunks // 8) or chunks % 16 or not chunks:
        raise ContractError(
            "values, index and scales do not fit together",
            got=f"{tuple(values.shape)}, {tuple(index.shape)}, {tuple(scales.shape)}",
            expected="[..., R, C/4] twice and [..., R, C/32], C a multiple of 64",
        )
    if scales.dtype != torch.bfloat16:
        raise ContractError("scales have the wrong dtype", got=scales.dtype, expected="torch.bfloat16")
    for name, tensor, low, high in (("values", values, -8, 7), ("index", index, 0, 3)):
        no_integers = tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
        if no_integers or bool((((wide := comparable(tensor)) < low) | (wide > high)).any()):
            raise ContractError(f"{name} are out of range", got=_range(tensor), expected=f"integers {low} .. {high}")
    i = torch.arange(8, device=values.device)
    q4, idx2 = ((part.long().unflatten(-1, (-1, 8))) for part in (values, index))
    words = (((q4 + 8) << (4 * i)) + (idx2 << (32 + 2 * i))).sum(-1)
    # the sign of a scale is the sign of its word: this product cannot overflow
    words += scales.view(torch.int16).long() * (1 << 48)
    return words.unflatten(-1, (-1, 2)).transpose(-2, -3).contiguous()


def unpack(words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of `pack`: values [..., R, C/4] int8, index [..., R, C/4] uint8, scales [..., R, C/32] bf16.

    Any 64 bits are a word: it decodes as the module's table says.

    Raises:
        ContractError: words [..., C/64, R, 2] int64 were expected.
    """
    check_words("words", words)
    rows = words.transpose(-2, -3).flatten(-2)  # [..., R, C/32]
    i = torch.arange(8, device=words.device)
    values = ((rows.unsqueeze(-1) >> (4 * i)) & 15) - 8
    index = (rows.unsqueeze(-1) >> (32 + 2 * i)) & 3
    scales = (rows >> 48).to(torch.int16).view(torch.bfloat16)
    return values.flatten(-2).to(torch.int8), index.flatten(-2).to(torch.uint8), scales


def dequantise(words: Tensor) -> Tensor:
    """Logical weights [..., R, C] fp32 of words [..., C/64, R, 2]: exact, as an int4 times a bf16 fits fp32.

    The 32 channels of a NaN or infinite scale are not finite.

    Raises:
        ContractError: words [..., C/64, R, 2] int64 were expected.
    """
    check_words("words", words)
    *lead, G2, R, _ = words.shape
    rows = words.transpose(-2, -3).reshape(-1, G2, 2)
    weights = torch.empty(len(rows), 64 * G2, dtype=torch.float32, device=words.device)
    block = max(1, _BLOCK // max(1, 2 * G2))
    decoder = Decoder(min(block, len(rows)) * 2 * G2, words.device)
    for start in range(0, len(rows), block):
        weights[start : start + block] = decoder.decode(rows[start : start + block])
    return weights.view(*lead, R, 64 * G2)


class Decoder:
    """Decodes up to `words` words at a time to fp32, in memory of its own: a call allocates nothing.

    One look-up gives eight channels: a byte holds their two q4, a nibble their two idx2.
    """

    def __init__(self, words: int, device: torch.device | str = "cpu"):
        self._table = _eight_channels().to(device)
        self._rows = torch.empty(words, dtype=torch.int64, device=device)
        self._codes, self._nibbles = torch.empty(2, words * 4, dtype=torch.int64, device=device)
        self._bits = torch.empty(words, dtype=torch.int16, device=device)
        self._scales = torch.empty(words, dtype=torch.float32, device=device)
        self._weights = torch.empty(words * 4, 8, dtype=torch.float32, device=device)
        self._byte = 8 * torch.arange(4, device=device)
        self._nibble = 32 + 4 * torch.arange(4, device=device)

    def decode(self, words: Tensor) -> Tensor:
        """Words [R, G2, 2], of any strides -> weights [R, 64 * G2] fp32, until the next call."""
        R, n = len(words), words.numel()
        rows = self._rows[:n].view(words.shape).copy_(words).view(n, 1)
        codes, nibbles = self._codes[: 4 * n].view(n, 4), self._nibbles[: 4 * n].view(n, 4)
        torch.bitwise_right_shift(rows, self._byte, out=codes).bitwise_and_(0xFF)
        torch.bitwise_right_shift(rows, self._nibble, out=nibbles).bitwise_and_(0xF)
        codes.add_(nibbles, alpha=256)
        weights = torch.index_select(self._table, 0, codes.view(-1), out=self._weights[: 4 * n])
        bits = self._bits[:n].copy_(torch.bitwise_right_shift(rows.view(n), 48, out=rows.view(n)))
        scales = self._scales[:n].copy_(bits.view(torch.bfloat16))
        return weights.view(n, GROUP).mul_(scales[:, None]).view(R, words.shape[1] * 2 * GROUP)


def _eight_channels() -> Tensor:
    """[4096, 8] fp32: channels of two chunks without their scale, by idx2 (bits 8 .. 11) and q4 (bits 0 .. 7)."""
    code = torch.arange(4096, device="cpu")[:, None]
    chunk = torch.arange(2, device="cpu")
    q4, idx2 = (code >> (4 * chunk)) & 15, (code >> (8 + 2 * chunk)) & 3
    kept = idx2[:, :, None] == torch.arange(4, device="cpu")
    return torch.where(kept, q4[:, :, None] - 8, 0).float().view(4096, 8)


class Int4_24Format:
    """See the module's docstring. Words are read as they lie."""

    name = NAME
    multiple = 64

    def check(self, experts: ExpertWeights) -> None:
        """Names, sizes, shapes and dtypes; `check_scales` reads the values."""
        if set(experts.tensors) != {"w13", "w2"}:
            raise ContractError(
                f"{NAME} experts need exactly two tensors", got=sorted(experts.tensors), expected="['w13', 'w2']"
            )
        check_silu(NAME, experts)
        E, H, I = experts.E, experts.H, experts.I
        check_sizes(self, H, I)
        w13, w2 = experts.tensors["w13"], experts.tensors["w2"]
        for name, words, shape, form in (
            ("w13", w13, (E, H // 64, 2 * I, 2), "[E, H/64, 2I, 2]"),
            ("w2", w2, (E, I // 64, H, 2), "[E, I/64, H, 2]"),
        ):
            check_words(name, words)
            if tuple(words.shape) != shape:
                raise ContractError(f"{name} has the wrong shape", got=tuple(words.shape), expected=f"{shape} ({form})")
            if not words.is_contiguous():
                raise ContractError(
                    f"{name} is not contiguous",
                    got=f"strides {words.stride()}",
                    expected=f"row-major {shape}",
                    remedy="lay the words out once, at load: .contiguous()",
                )
        if w13.device != w2.device:
            raise ContractError("w13 and w2 differ", got=f"{w13.device} and {w2.device}", expected="one device")

    def dequantize(self, experts: ExpertWeights, e: int) -> tuple[Tensor, Tensor]:
        gate_up, down = (dequantise(experts.tensors[name][e]) for name in ("w13", "w2"))
        if experts.gate_up_order == "interleaved":
            gate_up = torch.cat([gate_up[0::2], gate_up[1::2]])
        return gate_up, down

    def select(self, experts: ExpertWeights, index: Tensor) -> dict[str, Tensor]:
        return select_experts(experts.tensors, index)


def check_words(name: str, words: Tensor) -> None:
    """Raise ContractError unless words are a tensor [..., G2, R, 2] int64."""
    check_tensors(**{name: words})
    if words.dtype != torch.int64:
        raise ContractError(
            f"{name} has the wrong dtype",
            got=words.dtype,
            expected="torch.int64",
            remedy=f"{name}.view(torch.int64)" if words.dtype.itemsize == 8 else None,
        )
    check_together(**{name: words})
    if words.dim() < 3 or words.shape[-1] != 2 or not words.shape[-3]:
        raise ContractError(f"{name} has the wrong shape", got=tuple(words.shape), expected="[..., C/64, R, 2]")


def check_scales(**tensors: Tensor) -> None:
    """Raise ContractError if a scale of these words [E, G2, R, 2] is NaN or infinite, naming the first.

    It reads all words once, an expert at a time, and synchronises with a GPU.
    """
    for name, words in tensors.items():
        if words.is_meta:
            continue
        bad = torch.stack([((expert & _INFINITE) == _INFINITE).any() for expert in words])
        if not bool(bad.any()):
            continue
        e = int(bad.nonzero()[0])
        g2, r, half = ((words[e] & _INFINITE) == _INFINITE).nonzero()[0].tolist()
        scale = (words[e, g2, r, half] >> 48).to(torch.int16).view(torch.bfloat16)
        first = 64 * g2 + GROUP * half
        raise ContractError(
            f"{name} has a scale that is not finite",
            got=f"{float(scale)} for expert {e}, row {r}, group {2 * g2 + half} (channels {first} to {first + 31})",
            expected="finite scales",
            remedy="make the words again from the original weights",
        )


def fit_fp16(*tensors: Tensor) -> bool:
    """Whether fp16 holds the weights of these words [E, G2, R, 2] well enough for kernels that multiply in fp16.

    The largest scale of each expert lies below 32, and at 2^-13 or above, or is 0: of all rows, of gate rows and of up
    rows, in either order. Such kernels round weights to multiples of 2^-32, and so are exact for scales from 2^-25 on.
    It reads all words once, an expert at a time, and synchronises with a GPU. False without values: on meta, or while
    torch traces.

    Raises:
        ContractError: words [E, C/64, R, 2] int64 were expected.
    """
    for words in tensors:
        check_words("words", words)
        if words.dim() != 4:
            raise ContractError("words have the wrong shape", got=tuple(words.shape), expected="[E, C/64, R, 2]")
    if any(words.is_meta for words in tensors) or watcher(()) is not None:
        return False
    for words in tensors:
        bits = torch.stack([largest for expert in words for largest in _largest(expert)])
        largest = bits.to(torch.int16).view(torch.bfloat16).float()
        if not bool(((largest == 0) | (largest >= 2.0**-13) & (largest < 32)).all()):
            return False
    return True


def _largest(words: Tensor) -> list[Tensor]:
    """The bits of the largest scale of an expert's rows [G2, R, 2]: of each half of them, of even and of odd ones."""
    rows = ((words >> 48) & 0x7FFF).amax((0, 2))
    half = len(rows) // 2
    return [part.max() for part in (rows[:half], rows[half:], rows[::2], rows[1::2])]


def _range(tensor: Tensor) -> str:
    if not tensor.numel() or tensor.is_complex() or is_float8(tensor):
        return str(tensor.dtype)
    wide = comparable(tensor)
    return f"{tensor.dtype} from {wide.min()} to {wide.max()}"
