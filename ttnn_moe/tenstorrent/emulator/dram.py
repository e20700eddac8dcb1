"""DRAM of an emulated chip: tensors, interleaved over its banks, in memory that the engine also maps."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ...errors import BackendUnavailable, ContractError
from ...sizes import ceil_div
from .chip import CHIPS, ChipModel
from .formats import Format, find_format, from_faces, pack_blocks, to_faces, unpack_blocks

_FIRST_ADDRESS = 1 << 20  # nothing lies below it, so that address 0 is an error
_POISON = np.uint32(0xFFBAFFBA)  # NaN as fp32, and as bf16 in both halves


@dataclass(eq=False)
class Tensor:
    """A tensor in a device's DRAM.

    Args:
        shape: its shape; the last two dimensions are tiled.
        format: of its values.
        tiled: pages are tiles of 32 x 32; otherwise a page is a row (the last dimension).
        page_size: bytes from page to page of a bank.
        pages: how many.
        address: in every bank.
        in_bank, in_file: first byte and bytes that it takes of a bank, and of the file of the memory.
    """

    device: EmulatedChip
    shape: tuple[int, ...]
    format: Format
    tiled: bool
    page_size: int
    pages: int
    address: int
    storage: int
    shadow: int
    in_bank: tuple[int, int]
    in_file: tuple[int, int]
    freed: bool = field(default=False)

    def buffer_address(self) -> int:
        return self.address

    def accessor_args(self) -> list[int]:
        """Compile-time arguments of a TensorAccessor: interleaved in DRAM, aligned page size."""
        return [2, self.page_size]

    def bytes(self) -> np.ndarray:
        """[pages, page_size] of uint8, the device's memory itself."""
        size = self.pages * self.page_size
        return np.frombuffer(self.device.memory, np.uint8, size, self.storage).reshape(self.pages, self.page_size)

    def written(self) -> np.ndarray:
        """[pages, page_size / 4] of bool: whether the host or a kernel has written these four bytes."""
        words = self.pages * self.page_size // 4
        flags = np.frombuffer(self.device.memory, np.uint8, words, self.shadow)
        return (flags.reshape(self.pages, -1) & 1).astype(bool)

    def write(self, values: torch.Tensor, places: Sequence[int] | None = None) -> None:
        """Copy values of this shape to the device.

        Args:
            places: indices of the first dimension, each once; values are of these alone.
        """
        shape = self._shape_of(places)
        if tuple(values.shape) != shape:
            raise ContractError("cannot write a tensor", got=tuple(values.shape), expected=shape)
        rows = self._pages_of(places)
        self.bytes()[rows, : self._used()] = _to_pages(values, self)
        words = self.page_size // 4
        shadow = np.frombuffer(self.device.memory, np.uint8, self.pages * words, self.shadow)
        shadow.reshape(self.pages, words)[rows] = 1

    def read(self, places: Sequence[int] | None = None) -> torch.Tensor:
        """A copy of its values, on the host.

        Args:
            places: indices of the first dimension; the values of these alone.
        """
        pages = np.ascontiguousarray(self.bytes()[self._pages_of(places), : self._used()])
        return _from_pages(pages, self, self._shape_of(places))

    def clear(self) -> None:
        """Mark it as unwritten: reads give poison, and are reported."""
        self.bytes().reshape(-1).view(np.uint32)[:] = _POISON
        np.frombuffer(self.device.memory, np.uint8, self.pages * self.page_size // 4, self.shadow)[:] = 0

    def free(self) -> None:
        if not self.freed:
            self.freed = True
            self.device.tensors.remove(self)

    def _shape_of(self, places: Sequence[int] | None) -> tuple[int, ...]:
        return self.shape if places is None else (len(places), *self.shape[1:])

    def _pages_of(self, places: Sequence[int] | None) -> slice | np.ndarray:
        """Which of `pages` hold these indices of the first dimension, of three or more."""
        if places is None:
            return slice(None)
        each = self.pages // self.shape[0]
        return (np.asarray(places, dtype=np.int64)[:, None] * each + np.arange(each)).reshape(-1)

    def _used(self) -> int:
        return self.format.tile_bytes if self.tiled else self.shape[-1] * self.format.item


class EmulatedChip:
    """The DRAM of one emulated chip.

    Args:
        chip: a ChipModel or the name of one: n150, n300, p150.

    Raises:
        BackendUnavailable: this process may not map so large a file.
    """

    def __init__(self, chip: ChipModel | str = "p150"):
        self.chip = CHIPS[chip] if isinstance(chip, str) else chip
        self.tensors: list[Tensor] = []
        self.memory_bytes = 64 << 30
        try:
            if hasattr(os, "memfd_create"):
                self._file = os.memfd_create("ttnn-moe-emulator")
            else:
                self._file = os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR)
            # Sparse: only pages that are used take memory.
            os.ftruncate(self._file, self.memory_bytes)
            self.memory = mmap.mmap(
                self._file, self.memory_bytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_NORESERVE", 0)
            )
        except OSError as error:
            raise BackendUnavailable(
                "the DRAM of an emulated chip cannot be mapped",
                got=error.strerror or str(error),
                expected=f"{self.memory_bytes >> 30} GiB of addresses; tensors alone take memory",
                remedy="ulimit -v unlimited, and ulimit -f unlimited",
            ) from error

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    @property
    def file(self) -> int:
        """File descriptor of the memory."""
        return self._file

    def empty(self, shape: tuple[int, ...], dtype: str, *, tiled: bool = True) -> Tensor:
        """An uninitialised tensor."""
        tensor = self._allocate(tuple(shape), find_format(dtype), tiled)
        tensor.clear()
        return tensor

    def tensor(self, values: torch.Tensor, dtype: str | None = None, *, tiled: bool = True) -> Tensor:
        """A tensor with these values; dtype: one of formats.FORMATS (default: that of values)."""
        name = dtype or str(values.dtype).removeprefix("torch.")
        tensor = self._allocate(tuple(values.shape), find_format(name), tiled)
        tensor.write(values)
        return tensor

    def _allocate(self, shape: tuple[int, ...], kind: Format, tiled: bool) -> Tensor:
        if not shape or (not tiled and kind.item == 0):
            raise ContractError("no such tensor", got=f"shape {shape}, {kind.name}", expected="rows of a plain format")
        if tiled:
            *front, rows, columns = (1, *shape) if len(shape) == 1 else shape
            pages = int(np.prod(front, dtype=np.int64)) * ceil_div(rows, 32) * ceil_div(columns, 32)
            used = kind.tile_bytes
        else:
            pages, used = int(np.prod(shape[:-1], dtype=np.int64)), shape[-1] * kind.item
        unit = self.chip.dram_alignment
        page_size = max(unit, ceil_div(used, unit) * unit)
        in_bank = ceil_div(pages, self.chip.dram_banks) * page_size
        # Bytes, then one flag for each four of them; file offsets are those of whole host pages.
        total = ceil_div(pages * page_size * 5 // 4 + 8, 4096) * 4096
        address = _gap([t.in_bank for t in self.tensors], in_bank, unit)
        storage = _gap([t.in_file for t in self.tensors], total, 4096)
        if storage + total > self.memory_bytes or address + in_bank >= 1 << 32:
            raise ContractError(
                "no DRAM left on the simulated chip",
                got=f"{total:,} bytes wanted",
                expected=f"room in {self.memory_bytes:,} bytes",
                remedy="free tensors that are not needed",
            )
        tensor = Tensor(
            *(self, shape, kind, tiled, page_size, pages, address, storage, storage + pages * page_size),
            in_bank=(address, in_bank),
            in_file=(storage, total),
        )
        self.tensors.append(tensor)
        return tensor


def _gap(taken: list[tuple[int, int]], size: int, unit: int) -> int:
    """Start of the first free range of `size`, a multiple of `unit`, with a gap to its neighbours."""
    start = _FIRST_ADDRESS
    for begin, length in sorted(taken):
        if start + size <= begin:
            return start
        start = max(start, (begin + length + 2 * unit - 1) // unit * unit)
    return start


def _to_pages(values: torch.Tensor, tensor: Tensor) -> np.ndarray:
    kind = tensor.format
    values = values.detach().to("cpu", kind.dtype).contiguous()
    if kind.dtype == torch.bfloat16:
        plain = values.view(torch.int16).numpy()
    else:
        plain = values.numpy()
    if not tensor.tiled:
        return np.ascontiguousarray(plain).reshape(-1, plain.shape[-1]).view(np.uint8)
    matrix = plain.reshape(1, 1, -1) if plain.ndim == 1 else plain.reshape(-1, *plain.shape[-2:])
    rows, columns = ceil_div(matrix.shape[1], 32) * 32, ceil_div(matrix.shape[2], 32) * 32
    if (rows, columns) != matrix.shape[1:]:
        padded = np.zeros((matrix.shape[0], rows, columns), matrix.dtype)
        padded[:, : matrix.shape[1], : matrix.shape[2]] = matrix
        matrix = padded
    tiles = to_faces(matrix.reshape(-1, columns))
    return pack_blocks(tiles, kind) if kind.item == 0 else np.ascontiguousarray(tiles).view(np.uint8)


def _from_pages(pages: np.ndarray, tensor: Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    kind = tensor.format
    number = {torch.bfloat16: np.int16, torch.float32: np.float32, torch.int32: np.int32}.get(kind.dtype, np.uint8)
    number = np.int16 if kind.dtype == torch.int16 else number
    if tensor.tiled:
        matrix = (1, *shape) if len(shape) == 1 else shape
        rows, columns = ceil_div(matrix[-2], 32) * 32, ceil_div(matrix[-1], 32) * 32
        tiles = unpack_blocks(pages, kind) if kind.item == 0 else pages.view(number)
        plain = from_faces(tiles, tiles.shape[0] * 1024 // columns, columns).reshape(-1, rows, columns)
        plain = np.ascontiguousarray(plain[:, : matrix[-2], : matrix[-1]])
    else:
        plain = pages.view(number)
    values = torch.from_numpy(plain.copy())
    return (values.view(torch.bfloat16) if kind.dtype == torch.bfloat16 else values).reshape(shape)
