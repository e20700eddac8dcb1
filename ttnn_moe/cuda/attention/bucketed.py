"""Attention to packed tiers in CUDA C++: gpu_kernels/cuda/sm80/bucketed_attention.cu, then merge_splits.cu."""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_float, c_int32
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ...sizes import ceil_div
from .. import device as devices
from ..arch import target_of
from ..jit import load, spec
from .memory import scale_of
from .tiers import BITS, Tier, addresses, by_bits

NAME = "CUDA C++ bucketed_attention (mma.sync)"
HEAD_DIM, MOST_QUERIES = 128, 8
_PIECE, _Q_TILE, _ROW = 4608, 5 * 2048, 134 * 4
_TOKENS = {2: 32, 3: 32, 4: 32, 8: 16, 16: 8}
"""Tokens of a piece, which a warp takes at a time."""

MOST_SPLITS = 132
_COST = {2: (0.58, 0.0412), 3: (0.58, 0.0412), 4: (0.58, 0.0412), 8: (0.439, 0.0029), 16: (0.439, 0.0029)}
"""Microseconds of a warp's piece on an H200, and more for each warp beside it on the multiprocessor."""

_READ, _CROWD = 31_200.0, 0.206
"""Bytes a microsecond of a multiprocessor of 16 warps; what part of that time grows with its warps."""

_QUERY, _WARP, _MERGE, _SPLIT, _BLOCK = 0.71, 0.079, 1.03, 0.0061, 0.0067
"""Microseconds more: for each query that a warp prepares, for each warp of a block. Where rows are split: for the
merge, for each split, for each block."""

_STATIC, _RESERVED = 512, 1024
"""Bytes of a block's shared memory that are not dynamic, at most; that the system takes of each block."""


@dataclass(frozen=True)
class Plan:
    """How a call is cut.

    Attributes:
        warps: of a block. splits: blocks that share the keys of a row and a key/value head.
        tiles: groups of eight queries in a block.
        least: bytes of shared memory that a block asks for at least: see `alone`.
    """

    warps: int
    splits: int
    tiles: int = 1
    least: int = 0

    @property
    def shared_memory(self) -> int:
        """Bytes of a block."""
        return max(self.tiles * _Q_TILE + self.warps * 2 * _PIECE, self.warps * 8 * self.tiles * _ROW, self.least)

    def alone(self, blocks: int, multiprocessors: int, room: int) -> Plan:
        """With so much shared memory that no multiprocessor takes more than its share of the blocks.

        Blocks start while those of the kernel before still run. Without this, some multiprocessors would get two
        blocks and others none. Few blocks stay as they are.

        Args:
            room: bytes of a block, at most; a multiprocessor has 1 KiB more.
        """
        if blocks * 4 <= multiprocessors:
            return self
        share = ceil_div(blocks, multiprocessors)
        least = (room + _RESERVED) // (share + 1) - _RESERVED
        return replace(self, least=least) if least + _STATIC <= room else self


@dataclass(frozen=True)
class Shape:
    """Sizes of a call. wide: pages of a row, by BITS; 0: no such tier."""

    T: int
    n: int
    heads: int
    kv_heads: int
    page: int
    wide: tuple[int, ...]

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def most_pieces(self) -> int:
        """Of a row."""
        return sum(pages * self.page // _TOKENS[bits] for bits, pages in zip(BITS, self.wide, strict=True))

    def blocks(self, of: Plan) -> int:
        """Tiles of queries of a row and a key/value head."""
        return ceil_div(self.n * self.group, 8 * of.tiles)

    def width(self, of: Plan) -> int:
        """Queries of all tiles."""
        return self.blocks(of) * 8 * of.tiles


def why_not(
    device: torch.device, q: Tensor, tiers: Sequence[Tier], rows: Tensor, positions: Tensor | None
) -> str | None:
    """For q [T, n, heads, head_dim]."""
    T, n, heads, D = q.shape
    if D != HEAD_DIM:
        return "head_dim is not 128"
    if q.dtype != torch.bfloat16:
        return "the queries are not bf16"
    if T == 0 or n > MOST_QUERIES:
        return "no entries, or more than 8 queries a row"
    if T * ceil_div(n * heads // tiers[0].kv_heads, 8) >= 1 << 16:
        return "more than 65,535 groups of 8 query heads"
    for t in (rows, positions):
        if t is not None and not (t.dtype == torch.int64 and t.is_contiguous()):
            return "rows or positions are not int64, or not contiguous"
    if len({tier.page for tier in tiers}) > 1:
        return "tiers have pages of different sizes"
    if tiers[0].page % 64:
        return "a page is no multiple of 64 tokens"
    if device.type != "cuda":
        return "the device is no GPU"
    target = target_of(device)
    if target.arch is None:
        return target.reason
    for t in (q, *(tier.payload for tier in tiers), *(tier.scales for tier in tiers)):
        if not t.is_contiguous() or t.data_ptr() % 16:
            return "a tensor is not contiguous, or not aligned to 16 bytes"
    return None


@lru_cache(maxsize=1024)
def plan(shape: Shape, multiprocessors: int, shared_memory: int) -> Plan:
    """The cut that takes least time by a model of an H200, fitted to figures of 14 shapes in 4 to 11 cuts each.

    A multiprocessor's warps take turns, and wait for memory: the two times add up as squares. Of those 14 shapes, the
    cuts that it chooses take 1% longer than the best on average, 5% at most.

    Args:
        shared_memory: bytes of a block, at most.
    """
    tiles = min(ceil_div(shape.n * shape.group, 8), 2)
    if Plan(4, 1, tiles).shared_memory + _STATIC > shared_memory:
        tiles = 1
    pairs = shape.T * shape.kv_heads * ceil_div(shape.n * shape.group, 8 * tiles)
    a_block = Plan(4, 1, tiles).shared_memory + _STATIC
    resident = min(4 * (shared_memory // a_block), 16 if tiles == 1 else 8)
    alone, beside, read = _costs(shape)
    read *= pairs / (_READ * multiprocessors)
    best, least = Plan(4, 1, tiles), float("inf")
    for warps in (8, 16, 4):
        own = Plan(warps, 1, tiles)
        if warps > resident or own.shared_memory + _STATIC > shared_memory:
            continue
        for splits in range(1, max(1, min(MOST_SPLITS, resident // warps * multiprocessors // pairs)) + 1):
            pieces = ceil_div(shape.most_pieces, splits * warps)
            together = min(resident // warps, ceil_div(pairs * splits, multiprocessors))
            waves = ceil_div(pairs * splits, multiprocessors * together)
            busy = min(warps, ceil_div(shape.most_pieces, splits)) * together
            works = waves * pieces * (alone + beside * busy)
            took = math.hypot(works, read * (1 - _CROWD + _CROWD * busy / 16)) + _WARP * warps
            took += _QUERY * ceil_div(8 * tiles, warps)
            took += _MERGE + _SPLIT * splits + _BLOCK * pairs * splits if splits > 1 else 0
            if took < least:
                best, least = replace(own, splits=splits), took
    return best.alone(pairs * best.splits, multiprocessors, shared_memory)


def _costs(shape: Shape) -> tuple[float, float, float]:
    """Of a piece of a row, on average: see _COST. And bytes of all pieces of a row and a key/value head."""
    alone = beside = read = 0.0
    for bits, pages in zip(BITS, shape.wide, strict=True):
        pieces = pages * shape.page // _TOKENS[bits]
        alone += pieces * _COST[bits][0]
        beside += pieces * _COST[bits][1]
        read += pages * shape.page * (2 * HEAD_DIM * bits // 8 + 4)
    return alone / max(shape.most_pieces, 1), beside / max(shape.most_pieces, 1), read


def shape_of(q: Tensor, tiers: Sequence[Tier]) -> Shape:
    """Of q [T, n, heads, 128]."""
    T, n, heads, _ = q.shape
    wide = by_bits(tiers, lambda tier: tier.row_stride)
    return Shape(T, n, heads, tiers[0].kv_heads, tiers[0].page, wide)


def plan_of(q: Tensor, tiers: Sequence[Tier]) -> Plan:
    """The plan of a call on the device of q, which runs the kernel."""
    return plan_on(shape_of(q, tiers), q.device)


def plan_on(shape: Shape, device: torch.device) -> Plan:
    """The plan of a call on a device that runs the kernel."""
    return plan(shape, devices.gpu(device).multiprocessors, _room(device))


@lru_cache(maxsize=64)
def _room(device: torch.device) -> int:
    arch = target_of(device).arch
    assert arch is not None
    return arch.shared_memory


def launch(
    q: Tensor,
    tiers: Sequence[Tier],
    rows: Tensor,
    positions: Tensor | None = None,
    num_tokens: Tensor | None = None,
    out: Tensor | None = None,
    rotate: bool = False,
    mass: Sequence[Tensor] | None = None,
    q_scale: Tensor | None = None,
    of: Plan | None = None,
) -> Tensor:
    """Attention of q [T, n, heads, 128] to the tokens of all tiers -> as q.

    Args:
        rows: [T] int64, row of the tables of each entry.
        positions: [T] int64, position of the first of n queries. A query sees the tokens of tiers of 8 and 16 bits up
            to its own position, and all tokens of the others. None, or n = 1: all tokens.
        num_tokens: [] int32 on the device: entries from it on give 0. None: all T.
        out: as q, to write the result to.
        rotate: whether keys and values in the tiers are rotated, as quantise.rotate does; q and the result are not.
        mass: fp32 [pages] for each tier. The kernels add the attention that each page got, summed over queries and
            heads, in the same pass over the keys. None: nothing is added.
        q_scale: [128] fp32, which q is multiplied by before it is rotated: the inverse of what keys were. None: 1.
        of: default: `plan`.
    """
    T, n, heads, D = q.shape
    kv_heads, device = tiers[0].kv_heads, q.device
    out = torch.empty_like(q) if out is None else out
    shape = shape_of(q, tiers)
    of = of or plan_on(shape, device)
    partial = lse = weights = whole = None
    if of.splits > 1 or mass is not None:
        partial = q.new_empty(T, n, heads, of.splits, D, dtype=torch.float32)
        lse = q.new_empty(T, n, heads, of.splits, dtype=torch.float32)
    if mass is not None:
        weights = q.new_empty(T, kv_heads, shape.most_pieces, shape.width(of), dtype=torch.float32)
        whole = q.new_empty(T, n, heads, dtype=torch.float32)
    places = addresses(tiers, "payload", "scales", "token_ids", "table", "counts")
    causal = positions is not None and n > 1
    attend, join, sum_up = _launches(shape, causal, rotate, mass is not None, of, device)
    with torch.cuda.device(device):
        stream = load.stream(device.index)
        attend(
            stream,
            *(
                q.data_ptr(),
                load.pointer(q_scale),
                out.data_ptr(),
                load.pointer(partial),
                load.pointer(lse),
                load.pointer(weights),
                rows.data_ptr(),
            ),
            *(load.pointer(positions), load.pointer(num_tokens), *places),
        )
        if join is not None:
            join(stream, load.pointer(partial), load.pointer(lse), out.data_ptr(), load.pointer(whole))
        if sum_up is not None and mass is not None:
            ends = _ends(tiers, mass)
            sum_up(stream, load.pointer(weights), load.pointer(whole), rows.data_ptr(), load.pointer(num_tokens), *ends)
    return out


def _ends(tiers: Sequence[Tier], mass: Sequence[Tensor]) -> list[int]:
    """By BITS: addresses of the mass, the table and the counts of a tier; 0 without one."""
    of_bits = {tier.bits: (m, tier.table, tier.counts) for tier, m in zip(tiers, mass, strict=True)}
    return [load.pointer(t) for bits in BITS for t in of_bits.get(bits, (None,) * 3)]


@lru_cache(maxsize=1024)
def _launches(
    shape: Shape, causal: bool, rotate: bool, mass: bool, of: Plan, device: torch.device
) -> tuple[load.Launch, load.Launch | None, load.Launch | None]:
    """Of attention, of the merge of splits, of the sums by page."""
    arch = target_of(device).arch
    assert arch is not None
    wide = [c_int32(pages) for pages in shape.wide]
    pieces = c_int32(shape.most_pieces)
    attend = load.Launch(
        spec_of(arch.name, shape, causal, rotate, mass, of),
        device.index,
        (of.splits, shape.kv_heads, shape.T * shape.blocks(of)),
        32 * of.warps,
        *wide,
        pieces,
        c_float(scale_of(HEAD_DIM)),
        shared_memory=of.shared_memory,
        overlap=arch.overlaps,
    )
    join = sum_up = None
    if of.splits > 1 or mass:
        join = merge_launch(device, shape.T * shape.n * shape.heads, of.splits, rotate)
    if mass:
        pages = mass_spec(arch.name, shape)
        last = (*wide, pieces, c_int32(shape.kv_heads), c_int32(shape.width(of)))
        grid = (ceil_div(sum(shape.wide), 4), shape.T)
        sum_up = load.Launch(pages, device.index, grid, 128, *last, overlap=arch.overlaps)
    return attend, join, sum_up


def spec_of(arch: str, shape: Shape, causal: bool, rotate: bool, mass: bool, of: Plan) -> spec.Spec:
    """The kernel of a call; see its source for what the macros mean."""
    return spec.Spec.of(
        "sm80/bucketed_attention",
        arch,
        GROUP=shape.group,
        QUERIES=shape.n,
        PAGE=shape.page,
        TIERS=sum(1 << bits for bits, pages in zip(BITS, shape.wide, strict=True) if pages),
        CAUSAL=causal,
        ROTATE=rotate,
        MASS=mass,
        QT=of.tiles,
        WARPS=of.warps,
    )


def merge_spec(arch: str, rotate: bool, warps: int) -> spec.Spec:
    """The kernel that merges splits."""
    return spec.Spec.of("sm80/merge_splits", arch, ROTATE=rotate, WARPS=warps)


def merge_launch(device: torch.device, queries: int, splits: int, rotate: bool) -> load.Launch:
    """The merge of splits, for each query of each head."""
    arch = target_of(device).arch
    assert arch is not None
    warps = 8 if splits > 8 else 4
    merge = merge_spec(arch.name, rotate, warps)
    return load.Launch(merge, device.index, (queries,), 32 * warps, c_int32(splits), overlap=arch.overlaps)


def mass_spec(arch: str, shape: Shape) -> spec.Spec:
    """The kernel that adds up the mass of pages."""
    return spec.Spec.of("sm80/page_mass", arch, PAGE=shape.page, GROUP=shape.group, QUERIES=shape.n)
