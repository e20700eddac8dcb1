"""Attention of one query token a sequence on Hopper, in one launch: gpu_kernels/cuda/sm90/decode_attention.cu."""

from __future__ import annotations

from ctypes import c_float, c_int32
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ...sizes import ceil_div
from .. import device as devices
from ..arch import HOPPER, why_not_hopper, why_not_words
from ..jit import load, spec
from .decode_units import LONG
from .memory import Memory, scale_of, why_not_kept

NAME = "CUDA C++ decode_attention (sm_90a)"
TILE, MOST_PARTS, MOST_GROUP = 16, 8, 16
LONGEST = 512
"""Keys of a part, at most, where multiprocessors are left and rows have one section: twice what a block holds."""

SHORTEST = 256
"""Keys of a part, at least, where blocks share multiprocessors."""


@dataclass(frozen=True)
class Plan:
    """How a call is cut.

    Attributes:
        parts: blocks of a cluster, which shares the keys of a token and a key/value head.
        warps: of a block. stages: tiles of 16 keys that a warp holds.
        sections: clusters that share a row which is longer than one holds.
    """

    parts: int
    warps: int
    stages: int
    sections: int = 1

    @property
    def held(self) -> int:
        """Keys that a cluster holds."""
        return self.stages * self.warps * self.parts * TILE

    def ring(self, capacity: int) -> bool:
        """Whether a warp may have more tiles than it holds."""
        return self.held * self.sections < capacity

    def shared_memory(self, D: int, group: int) -> int:
        """Bytes of a block."""
        slots = self.warps * self.stages * 4 * TILE * D
        queries, warps = 8 * ceil_div(group, 8), self.parts * self.warps
        merged = 4 * warps * queries * (D // self.parts + 2)
        return slots + merged + 8 if self.parts > 1 else max(slots, merged)

    def sums(self, slots: int, D: int, group: int) -> int:
        """fp32 words that clusters which share rows write, in so many slots."""
        return slots * self.parts * (2 + D // self.parts) * 8 * ceil_div(group, 8)


@lru_cache(maxsize=1024)
def plan(pairs: int, capacity: int, multiprocessors: int, counted: bool = False) -> Plan:
    """The cut of `pairs` tokens and key/value heads.

    Parts, while each block has a multiprocessor and each warp a tile; or, in two waves, while parts are long. Sections,
    where parts are long and multiprocessors are left. Blocks on most multiprocessors hold two tiles a warp, and one
    where most multiprocessors have two blocks of many parts, so that others have room beside them.

    Args:
        counted: there are Memory.turns.
    """
    parts = 1
    while parts < MOST_PARTS:
        blocks = 2 * parts * pairs
        alone = blocks <= multiprocessors and 4 * TILE * parts < capacity
        if not alone and not (blocks <= 2 * multiprocessors and capacity >= 2 * parts * SHORTEST):
            break
        parts *= 2
    blocks = parts * pairs
    warps = 8 if blocks <= multiprocessors and parts <= 2 and capacity > 4 * TILE * parts else 4
    # with more, the blocks of the next kernel find no room beside them
    if parts >= 4 and 2 * blocks > 3 * multiprocessors:
        most = 1
    else:
        most = 2 if warps == 8 or 2 * blocks > multiprocessors else 4
    stages = 1
    while stages < most and stages * warps * parts * TILE < capacity:
        stages *= 2
    one = Plan(parts, warps, stages)
    if not counted or not _leaves_room(one, pairs, capacity, multiprocessors):
        return one
    one = replace(one, stages=2)
    return replace(one, sections=min(multiprocessors // blocks, ceil_div(capacity, one.held)))


def plan_of_units(capacity: int) -> Plan:
    """The cut of Memory.units: long parts of rows want more warps."""
    return Plan(1, 8, 1) if capacity > LONG else Plan(1, 4, 2)


def _leaves_room(of: Plan, pairs: int, capacity: int, multiprocessors: int) -> bool:
    """Whether one section has long parts, and leaves multiprocessors idle."""
    return capacity > LONGEST * of.parts and 2 * of.parts * pairs <= multiprocessors


def cuts_begin(most: int, kv_heads: int, capacity: int, device: torch.device, counted: bool = False) -> list[int]:
    """Numbers of tokens, up to `most`, from which on a call takes another cut: each cut is a kernel to compile."""
    multiprocessors = devices.gpu(device).multiprocessors
    plans = [plan(T * kv_heads, capacity, multiprocessors, counted) for T in range(1, most + 1)]
    return [T + 1 for T, of in enumerate(plans) if of not in plans[:T]]


def why_not(device: torch.device, q: Tensor, memory: Memory, out: Tensor | None = None) -> str | None:
    """For q [T, heads, head_dim]."""
    T, heads, D = q.shape
    kv_heads, page, capacity = memory.keys.shape[1], memory.page, memory.capacity
    if not 0 < T < 1 << 16:
        return "no tokens, or more than 65,535"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return "neither bf16 nor fp16"
    if D not in (64, 128):
        return "head_dim is neither 64 nor 128"
    if heads // kv_heads > MOST_GROUP:
        return "more than 16 query heads share a key/value head"
    if page % TILE:
        return "a page is no multiple of 16 tokens"
    reason = why_not_hopper(device)
    if reason is not None:
        return reason
    pairs, multiprocessors = T * kv_heads, devices.gpu(device).multiprocessors
    of, turns = plan(pairs, capacity, multiprocessors), memory.turns
    if _leaves_room(of, pairs, capacity, multiprocessors) and (turns is None or turns.numel() < pairs * of.parts):
        return f"rows of up to {capacity:,} tokens need more than 8 parts to fill the GPU, and so Memory.turns"
    if memory.rows.dtype not in (torch.int64, torch.int32) or memory.positions.dtype != torch.int64:
        return "rows are neither int64 nor int32, or positions are not int64"
    return why_not_kept(q.dtype, memory) or why_not_words(q.dtype, q, *(() if out is None else (out,)))


def launch(q: Tensor, memory: Memory, out: Tensor | None = None, of: Plan | None = None) -> Tensor:
    """As decode.launch. of: default: `plan`."""
    (T, heads, D), kv_heads, device = q.shape, memory.keys.shape[1], q.device
    out = torch.empty_like(q) if out is None else out
    pages, count, turns = memory.pages, memory.num_tokens, memory.turns
    if of is None and memory.units is not None:
        of = plan_of_units(memory.capacity)
    of = of or plan(T * kv_heads, memory.capacity, devices.gpu(device).multiprocessors, turns is not None)
    units = memory.units if of.parts == of.sections == 1 else None
    n, slots = (0, T * of.sections) if units is None else (len(units), 2 * (len(units) - T))
    sums = None
    if of.sections > 1 or n:
        assert turns is not None and turns.numel() >= T * kv_heads * of.parts, "blocks of one row count in turns"
        sums = q.new_empty(of.sums(slots * kv_heads, D, heads // kv_heads), dtype=torch.float32)
    narrow, early = memory.rows.dtype == torch.int32, memory.past_written
    with torch.cuda.device(device):
        sizes = T, heads, kv_heads, D, memory.stride, memory.page, memory.capacity
        _launch(q.dtype, *sizes, narrow, early, n, of, device)(
            load.stream(device.index),
            q.data_ptr(),
            memory.keys.data_ptr(),
            memory.values.data_ptr(),
            load.pointer(pages),
            memory.rows.data_ptr(),
            memory.positions.data_ptr(),
            load.pointer(count),
            load.pointer(units),
            out.data_ptr(),
            load.pointer(sums),
            load.pointer(turns),
        )
    return out


@lru_cache(maxsize=1024)
def _launch(
    dtype: torch.dtype,
    T: int,
    heads: int,
    kv_heads: int,
    D: int,
    stride: int,
    page: int,
    capacity: int,
    narrow: bool,
    early: bool,
    units: int,
    of: Plan,
    device: torch.device,
) -> load.Launch:
    group = heads // kv_heads
    return load.Launch(
        spec_of(of, dtype, group, D, stride, page, of.ring(capacity), narrow, early, units > 0),
        device.index,
        (of.parts * kv_heads, units or T, of.sections),
        32 * of.warps,
        c_float(scale_of(D)),
        c_int32(capacity),
        c_int32(capacity // page if page else 0),
        shared_memory=of.shared_memory(D, group),
        cluster=of.parts,
        overlap=True,
    )


def spec_of(
    of: Plan,
    dtype: torch.dtype,
    group: int,
    D: int,
    stride: int,
    page: int,
    ring: bool,
    narrow: bool,
    early: bool,
    units: bool = False,
) -> spec.Spec:
    """The kernel of a cut, for pages of `page` keys (0: dense) and `group` query heads for each key/value head.

    Args:
        ring: see Plan.ring. narrow: rows are int32. early: see Memory.past_written. units: see Memory.units.
    """
    return spec.Spec.of(
        "sm90/decode_attention",
        HOPPER.name,
        PARTS=of.parts,
        WARPS=of.warps,
        STAGES=of.stages,
        SECTIONS=of.sections,
        GROUP=group,
        HEAD_DIM=D,
        STRIDE=stride,
        PAGE=page,
        RING=ring,
        NARROW=narrow,
        EARLY=early,
        UNITS=units,
        FP16=dtype == torch.float16,
    )
