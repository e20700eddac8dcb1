"""Data formats of circular buffers and tensors; tensors to and from the bytes in DRAM."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ...errors import ContractError


@dataclass(frozen=True)
class Format:
    """A data format: tt-metal's number and name, bytes of a 32 x 32 tile, bytes of one value (0: in blocks only)."""

    code: int
    name: str
    tile_bytes: int
    item: int
    dtype: torch.dtype


FORMATS = {
    "float32": Format(0, "Float32", 4096, 4, torch.float32),
    "bfloat16": Format(5, "Float16_b", 2048, 2, torch.bfloat16),
    "bfloat8_b": Format(6, "Bfp8_b", 1088, 0, torch.float32),
    "bfloat4_b": Format(7, "Bfp4_b", 576, 0, torch.float32),
    "int32": Format(8, "Int32", 4096, 4, torch.int32),
    "uint16": Format(9, "UInt16", 2048, 2, torch.int16),
    "uint32": Format(24, "UInt32", 4096, 4, torch.int32),
    "uint8": Format(30, "UInt8", 1024, 1, torch.uint8),
}

_WIDTHS = {"Bfp8_b": 7, "Bfp4_b": 3}  # bits of a magnitude; its leading one is kept, sixteen share an exponent


def find_format(name: object) -> Format:
    """The format of that name (bfloat16 ... as ttnn writes them, or Float16_b ... as tt-metal does)."""
    text = str(name).rsplit(".", 1)[-1]
    for known, found in FORMATS.items():
        if text.lower() in (known, found.name.lower()):
            return found
    raise ContractError("unknown data format", got=repr(name), expected=", ".join(FORMATS))


def to_faces(values: np.ndarray) -> np.ndarray:
    """[R, C] with R and C multiples of 32 -> [tiles, 1024] in the order of L1: tiles by row, faces of 16 x 16."""
    rows, columns = values.shape
    split = values.reshape(rows // 32, 2, 16, columns // 32, 2, 16)
    return split.transpose(0, 3, 1, 4, 2, 5).reshape(-1, 1024)


def from_faces(tiles: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The inverse of to_faces."""
    split = tiles.reshape(rows // 32, columns // 32, 2, 2, 16, 16)
    return split.transpose(0, 2, 4, 1, 3, 5).reshape(rows, columns)


def pack_blocks(tiles: np.ndarray, kind: Format) -> np.ndarray:
    """[tiles, 1024] fp32 in face order -> [tiles, tile_bytes]: 64 shared exponents, then sign and magnitude each.

    Rounds as ttnn's from_torch does: a value is first cut to the place of the largest exponent of its 16, then rounded
    to nearest, ties to even. Of two values of 4 bits in a byte, the first has the low ones.
    """
    width = _WIDTHS[kind.name]
    bits = np.ascontiguousarray(tiles, np.float32).view(np.uint32).reshape(-1, 64, 16)
    exponent = (bits >> 23) & 255
    top = exponent.max(-1, keepdims=True)
    mantissa = np.where(exponent, (bits & 0x7FFFFF) | 0x800000, 0) >> np.minimum(top - exponent, 31)
    drop = 24 - width
    kept, rest = mantissa >> drop, mantissa & ((1 << drop) - 1)
    half = 1 << (drop - 1)
    kept = np.minimum(kept + ((rest > half) | ((rest == half) & (kept & 1 == 1))), (1 << width) - 1)
    value = (kept | np.where(kept != 0, (bits >> 31) << width, 0)).reshape(-1, 1024).astype(np.uint8)
    out = np.empty((bits.shape[0], kind.tile_bytes), np.uint8)
    out[:, :64] = top[..., 0]
    out[:, 64:] = value if width == 7 else value[:, ::2] | value[:, 1::2] << 4
    return out


def unpack_blocks(data: np.ndarray, kind: Format) -> np.ndarray:
    """The inverse of pack_blocks, to fp32."""
    width = _WIDTHS[kind.name]
    exponent = data[:, :64].astype(np.int64)[:, :, None]
    value = data[:, 64:] if width == 7 else np.stack((data[:, 64:] & 15, data[:, 64:] >> 4), -1)
    value = value.reshape(-1, 64, 16)
    magnitude = (value & ((1 << width) - 1)).astype(np.float32)
    # the bits of a number, so that what exceeds the range is what they spell: infinity, or NaN
    own = (magnitude.view(np.uint32).astype(np.int64) >> 23) + exponent - 127 - (width - 1)
    word = own << 23 | magnitude.view(np.uint32) & 0x7FFFFF | (value >> width).astype(np.int64) << 31
    return np.where((value == 0) | (own <= 0), 0, word).astype(np.uint32).view(np.float32).reshape(-1, 1024)
