"""MXFP4 experts in the order in which Hopper's kernels read them: the tensors of `mxfp4`, with their bytes arranged.

Names, shapes, dtypes and biases are those of `mxfp4`. A chunk is 32 channels of a row: 16 bytes of blocks, one scale.
Blocks and scales of an expert list its chunks in one order, in which a box of 128 rows by 256 channels is contiguous.
Bits within eight bytes change places, too. gpu_kernels/cuda/sm80/mxfp4_boxes.cuh has both orders in words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from .format import ExpertWeights
from .in_place import Mark, Part, Torn, change, no_mark
from .mxfp4 import GROUP, Mxfp4Format, dequantise
from .ue8m0 import NAN

NAME = "mxfp4_boxes"
_UNIT = 4  # groups
_STAGE = 8  # groups
_ROWS = 16  # of a fragment
_BOX = 8  # fragments
_BLOCK = 1 << 26  # bytes at a time


@lru_cache(maxsize=16)
def chunk_order(rows: int, groups: int, gate_up_order: str | None) -> Tensor:
    """Of each place of an expert's matrix [rows, 32 * groups], the chunk there: row * groups + group, int64.

    gate_up_order: of a gate_up matrix; None for down.
    """
    chunks = torch.arange(rows * groups, device="cpu").view(rows, groups)
    if gate_up_order is None:
        boxes = [box.unflatten(0, (-1, _ROWS)) for box in chunks.split(_ROWS * _BOX)]
    else:
        boxes = _gate_up_boxes(chunks, gate_up_order)
    parts = []
    for box in boxes:  # [fragments, rows of a fragment, groups]
        for stage in box.split(_STAGE, -1):
            units = [unit.unflatten(1, (2, -1)).flatten(1) for unit in stage.split(_UNIT, -1)]
            parts.append(torch.cat(units, 1).flatten())
    return torch.cat(parts)


def _gate_up_boxes(chunks: Tensor, order: str) -> list[Tensor]:
    """Boxes of gate_up [8, rows of a fragment, groups]: of each fragment gate rows, then their up rows."""
    I = len(chunks) // 2
    # [I, gate or up, groups]
    pairs = chunks.unflatten(0, (I, 2)) if order == "interleaved" else chunks.unflatten(0, (2, I)).transpose(0, 1)
    boxes = []
    for unit in pairs.split(GROUP * _UNIT):
        # [c, i, h, j, gate or up, groups] -> [i, j, gate or up, c, h, groups]
        fragments = unit.unflatten(0, (-1, 4, 2, 4)).permute(1, 3, 4, 0, 2, 5).flatten(2, 4).flatten(0, 1)
        boxes += fragments.split(_BOX)
    return boxes


def _places() -> list[int]:
    """Of each bit of eight bytes in mxfp4's order, its place in the arranged ones.

    Word p of two holds numbers n = 8 p ... 8 p + 7. Numbers j and 4 + j of a word are the halves of the pair that the
    kernel's `spread_arranged` makes as word j.
    """
    places = [-1] * 64

    def put(word: int, j: int, bits: list[tuple[int, int]]) -> None:
        """bits: word and bit of sign, and of bits 2, 1, 0 of the low half's number; for the high half 16 more."""
        for half in (0, 1):
            for source, (to, bit) in zip((3, 2, 1, 0), bits, strict=True):
                places[32 * word + 4 * (j + 4 * half) + source] = 32 * to + (bit + 16 * half) % 32

    for word in (0, 1):
        put(word, 0, [(word, 15), (word, 8), (word, 7), (word, 6)])
        put(word, 1, [(word, 11), (word, 4), (word, 3), (word, 2)])
        put(word, 2, [(word, 21), (word, 14), (word, 13), (word, 12)])
    # shared: bits 0, 1, 9, 10 of the first word, and of the second two places higher
    put(0, 3, [(0, 9), (1, 0), (0, 1), (0, 0)])
    put(1, 3, [(1, 17), (1, 10), (1, 9), (0, 10)])
    return places


@lru_cache(maxsize=2)
def _tables(inverse: bool) -> Tensor:
    """[8, 256] int64: what each value of each of eight bytes becomes. On the CPU: vLLM's sleep mode forgets what was
    allocated on a GPU while a model was loaded."""
    places = _places()
    if inverse:
        places = [places.index(bit) for bit in range(64)]
    values = torch.arange(256, device="cpu")
    tables = torch.zeros(8, 256, dtype=torch.int64, device="cpu")
    for byte in range(8):
        for bit in range(8):
            to = places[8 * byte + bit]
            tables[byte] |= (values >> bit & 1) * (1 << to if to < 63 else -(1 << 63))
    return tables


def _exchange(eights: Tensor, tables: Tensor) -> Tensor:
    """Bits of numbers [..., 8] uint8 in other places."""
    out = torch.zeros(eights.shape[:-1], dtype=torch.int64, device=eights.device)
    for byte in range(8):
        out |= tables[byte][eights[..., byte].int()]
    return out.view(torch.uint8).view(eights.shape)


@torch.inference_mode()
def reorder(tensors: Mapping[str, Tensor], gate_up_order: str, inverse: bool, mark: Mark = no_mark) -> None:
    """Arrange tensors of mxfp4 in place, some experts at a time, or bring arranged ones back.

    Where this fails or is interrupted, the tensors have the bytes of before.

    Args:
        mark: called with whether they are arranged now.

    Raises:
        Torn: that, too, failed or was interrupted. All scales are NaN then: no use gives numbers.
    """
    names = [f"{matrix}_{part}" for matrix in ("gate_up", "down") for part in ("blocks", "scales")]
    parts = [part for name in names for part in _parts(name, tensors[name], gate_up_order, inverse)]
    try:
        change(parts, lambda changed: mark(changed != inverse))
    except Torn:
        for name in names:
            if name.endswith("_scales"):
                tensors[name].fill_(NAN)
        raise


@torch.inference_mode()
def reorder_tensor(name: str, tensor: Tensor, gate_up_order: str, inverse: bool, mark: Mark = no_mark) -> None:
    """As `reorder`, of the tensor of that name alone: the bytes of one never go to another.

    Raises:
        Torn: it failed, and so did bringing the old bytes back.
    """
    change(_parts(name, tensor, gate_up_order, inverse), lambda changed: mark(changed != inverse))


@torch.inference_mode()
def restore_matrix(blocks: Tensor, scales: Tensor, gate_up_order: str | None) -> tuple[Tensor, Tensor]:
    """Blocks [R, C/2] and scales [R, C/32] of an arranged matrix, brought back in place. None: of down."""
    for tensor, mover in ((blocks[None], _mover_of_blocks), (scales[None], _mover_of_scales)):
        tensor.copy_(mover(tensor, gate_up_order, True)(tensor))
    return blocks, scales


def _parts(name: str, tensor: Tensor, gate_up_order: str, inverse: bool) -> list[Part]:
    """The tensor of that name, some experts at a time."""
    order = gate_up_order if name.startswith("gate_up") else None
    mover = _mover_of_blocks if name.endswith("_blocks") else _mover_of_scales
    there = mover(tensor, order, inverse)

    def back(part: Tensor) -> Tensor:
        return mover(tensor, order, not inverse)(part)

    return [Part(part, there, back) for part in tensor.split(max(1, _BLOCK // tensor[0].numel()))]


def _chunks(rows: int, groups: int, order: str | None, inverse: bool, device: torch.device) -> Tensor:
    places = chunk_order(rows, groups, order).to(device)
    return places.argsort() if inverse else places


def _mover_of_blocks(blocks: Tensor, order: str | None, inverse: bool) -> Callable[[Tensor], Tensor]:
    """What gives the new bytes of some experts of these blocks."""
    _, rows, width = blocks.shape
    places = _chunks(rows, 2 * width // GROUP, order, inverse, blocks.device)
    tables = _tables(inverse).to(blocks.device)

    def moved(part: Tensor) -> Tensor:
        wide = _exchange(part.view(len(part), -1, 8), tables).view(len(part), -1, GROUP // 2)
        return wide[:, places].view(part.shape)

    return moved


def _mover_of_scales(scales: Tensor, order: str | None, inverse: bool) -> Callable[[Tensor], Tensor]:
    """What gives the new bytes of some experts of these scales."""
    _, rows, groups = scales.shape
    places = _chunks(rows, groups, order, inverse, scales.device)

    def moved(part: Tensor) -> Tensor:
        return part.flatten(1)[:, places].view(part.shape)

    return moved


class Mxfp4BoxesFormat(Mxfp4Format):
    """See the module's docstring."""

    name = NAME

    def dequantize(self, experts: ExpertWeights, e: int) -> tuple[Tensor, Tensor]:
        def matrix(name: str, order: str | None) -> Tensor:
            blocks, scales = experts.tensors[f"{name}_blocks"][e], experts.tensors[f"{name}_scales"][e]
            return dequantise(*restore_matrix(blocks.clone(), scales.clone(), order))

        gate_up, down = matrix("gate_up", experts.gate_up_order), matrix("down", None)
        if experts.gate_up_order == "interleaved":
            gate_up = torch.cat([gate_up[0::2], gate_up[1::2]])
        return gate_up, down
