"""Attention to packed tiers in CUDA C++: gpu_kernels/cuda/sm80/bucketed_attention.cu, then merge_splits.cu."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float, c_int32
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...sizes import ceil_div
from .. import device as devices
from ..arch import target_of
from ..jit import load, spec
from .memory import scale_of
from .tiers import BITS, Tier

NAME = "CUDA C++ bucketed_attention (mma.sync)"
HEAD_DIM, MOST_QUERIES = 128, 8
_HALF_STEP, _Q_TILE, _ROW = 4608, 5 * 2048, 132 * 4
_TOKENS = {2: 64, 3: 64, 4: 64, 8: 32, 16: 16}
"""Tokens of a warp's step."""


@dataclass(frozen=True)
class Plan:
    """How a call is cut.

    Attributes:
        warps: of a block. splits: blocks that share the keys of a row and a key/value head.
        tiles: groups of eight queries in a block.
    """

    warps: int
    splits: int
    tiles: int = 1

    @property
    def shared_memory(self) -> int:
        """Bytes of a block."""
        return max(self.tiles * _Q_TILE + self.warps * 2 * _HALF_STEP, self.warps * 8 * self.tiles * _ROW)


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


def plan(T: int, n: int, heads: int, tiers: Sequence[Tier], multiprocessors: int) -> Plan:
    """A block for each row, key/value head and tile of queries, times splits that fill one wave."""
    kv_heads = tiers[0].kv_heads
    queries = ceil_div(n * heads // kv_heads, 8)
    tiles = min(queries, 2)
    warps = 4
    most = sum(ceil_div(tier.capacity, _TOKENS[tier.bits]) for tier in tiers)
    resident = multiprocessors * (4 if tiles == 1 else 2)
    splits = resident // (T * kv_heads * ceil_div(queries, tiles))
    return Plan(warps, max(1, min(splits, ceil_div(most, warps))), tiles)


def launch(
    q: Tensor,
    tiers: Sequence[Tier],
    rows: Tensor,
    positions: Tensor | None = None,
    num_tokens: Tensor | None = None,
    out: Tensor | None = None,
    rotate: bool = False,
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
        of: default: `plan`.
    """
    T, n, heads, D = q.shape
    kv_heads, device = tiers[0].kv_heads, q.device
    of = of or plan(T, n, heads, tiers, devices.gpu(device).multiprocessors)
    out = torch.empty_like(q) if out is None else out
    partial = lse = None
    if of.splits > 1:
        partial = q.new_empty(T, n, heads, of.splits, D, dtype=torch.float32)
        lse = q.new_empty(T, n, heads, of.splits, dtype=torch.float32)
    by_bits = {tier.bits: tier for tier in tiers}
    wide = tuple(by_bits[bits].table.shape[1] if bits in by_bits else 0 for bits in BITS)
    places: list[int] = []
    for bits in BITS:
        tier = by_bits.get(bits)
        tensors = () if tier is None else (tier.payload, tier.scales, tier.token_ids, tier.table, tier.counts)
        places += [t.data_ptr() for t in tensors] or [0] * 5
    mask = sum(1 << bits for bits in by_bits)
    causal = positions is not None and n > 1
    attend, join = _launches(T, n, heads, kv_heads, tiers[0].page, mask, causal, rotate, wide, of, device)
    with torch.cuda.device(device):
        stream = load.stream(device.index)
        attend(
            stream,
            *(q.data_ptr(), out.data_ptr(), _address(partial), _address(lse), rows.data_ptr()),
            *(_address(positions), _address(num_tokens), *places),
        )
        if join is not None:
            join(stream, _address(partial), _address(lse), out.data_ptr())
    return out


def _address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


@lru_cache(maxsize=1024)
def _launches(
    T: int,
    n: int,
    heads: int,
    kv_heads: int,
    page: int,
    mask: int,
    causal: bool,
    rotate: bool,
    wide: tuple[int, ...],
    of: Plan,
    device: torch.device,
) -> tuple[load.Launch, load.Launch | None]:
    arch = target_of(device).arch
    assert arch is not None
    group = heads // kv_heads
    attend = load.Launch(
        spec_of(arch.name, group, n, page, mask, causal, rotate, of),
        device.index,
        (of.splits, kv_heads, T * ceil_div(n * group, 8 * of.tiles)),
        32 * of.warps,
        *(c_int32(width) for width in wide),
        c_float(scale_of(HEAD_DIM)),
        shared_memory=of.shared_memory,
        overlap=arch.overlaps,
    )
    if of.splits == 1:
        return attend, None
    merge = spec.Spec.of("sm80/merge_splits", arch.name, ROTATE=rotate)
    return attend, load.Launch(merge, device.index, (T * n * heads,), 128, c_int32(of.splits), overlap=arch.overlaps)


def spec_of(arch: str, group: int, n: int, page: int, mask: int, causal: bool, rotate: bool, of: Plan) -> spec.Spec:
    """The kernel for n queries of `group` heads a key/value head, pages of `page` tokens, tiers of mask (1 << bits)."""
    return spec.Spec.of(
        "sm80/bucketed_attention",
        arch,
        GROUP=group,
        QUERIES=n,
        PAGE=page,
        TIERS=mask,
        CAUSAL=causal,
        QT=of.tiles,
        WARPS=of.warps,
        ROTATE=rotate,
    )
