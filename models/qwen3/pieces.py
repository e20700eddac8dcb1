"""Tensors of safetensors files, read a piece at a time: rows, or the share of one rank."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from .files import reading
from .split import WHOLE, Region, Split

FILE_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "U8": torch.uint8,
}
Header = dict[str, Any]
"""Of a tensor in a file: its "file", "shape" and "dtype"."""
Progress = Callable[[int, int], None]
"""Called with bytes read so far and bytes in all."""
# mapped pages of a file count as ours until it is closed
_CHUNK_BYTES = 16 << 20


def bytes_of(header: Header) -> int:
    """Bytes of a tensor by its header."""
    return math.prod(header["shape"]) * FILE_DTYPES[header["dtype"]].itemsize


def reading_file(path: Path) -> AbstractContextManager[None]:
    """What goes wrong inside is a CheckpointError that names the file."""
    size = f"{path.stat().st_size} bytes" if os.path.isfile(path) else "absent"
    return reading(path, f"is not a whole safetensors file ({size})", "download or copy it again")


def open_file(path: Path) -> Any:
    """A safetensors file, open for reading. What the parser raises becomes a CheckpointError that names the file."""
    with reading_file(path):
        return safe_open(path, framework="pt")


def region_of(file: Any, path: Path, name: str, region: Region) -> Tensor:
    """These rows, columns, ... of a tensor in an open file; no other byte is read."""
    with reading_file(path):
        return file.get_slice(name)[region]


@dataclass(frozen=True)
class Piece:
    """Some rows of what a rank reads of a tensor: where they lie in the file's tensor and in the rank's own."""

    file: Path
    name: str
    there: Region
    here: Region
    nbytes: int


def pieces(found: Mapping[str, Header], into: Mapping[str, Tensor], split: Split = WHOLE) -> list[Piece]:
    """In file order; big tensors in several. into: the rank's own tensors, of the shapes of its share."""
    out = []
    for name, header in found.items():
        itemsize = FILE_DTYPES[header["dtype"]].itemsize
        for there, here in split.regions(name, header["shape"], tuple(into[name].shape)):
            rows, *others = here
            row_bytes = math.prod(part.stop - part.start for part in others) * itemsize
            height = max(1, _CHUNK_BYTES // row_bytes)
            for start in range(rows.start, rows.stop, height):
                n = min(height, rows.stop - start)
                first = there[0].start + start - rows.start
                source, target = (slice(first, first + n), *there[1:]), (slice(start, start + n), *others)
                out.append(Piece(header["file"], name, source, target, n * row_bytes))
    return out


def copy(
    found: Mapping[str, Header], into: Mapping[str, Tensor], progress: Progress | None = None, split: Split = WHOLE
) -> None:
    """Copy a rank's share of every tensor, reopening files as it goes so that few of their pages stay mapped."""
    left = pieces(found, into, split)[::-1]
    total, done = sum(piece.nbytes for piece in left), 0
    while left:
        path, opened = left[-1].file, 0
        with open_file(path) as file:
            while left and left[-1].file == path and opened < _CHUNK_BYTES:
                piece = left.pop()
                into[piece.name][piece.here].copy_(region_of(file, path, piece.name, piece.there))
                opened += piece.nbytes
        done += opened
        if progress is not None:
            progress(done, total)
