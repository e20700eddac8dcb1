"""Writes into packed tiers in CUDA C++: gpu_kernels/cuda/sm80/bucketed_{write,stay,units}.cu."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float, c_int32
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...accelerator import upload
from ...sizes import ceil_div
from ..arch import target_of
from ..jit import load, spec
from .tiers import BITS, UNIT, Layers, Tier, addresses

NAME = "CUDA C++ bucketed_write"
HEAD_DIM = 128


@dataclass(frozen=True)
class Ring:
    """The high tier of one layer, whose slots follow from positions: `sinks` first tokens, then a ring.

    Attributes:
        key_scale: [D] fp32, what keys are divided by before they are rotated.
        sinks, ring: slots. names: whether writes into this layer set token_ids, which all layers share.
    """

    tier: Tier
    key_scale: Tensor
    sinks: int
    ring: int
    names: bool

    def slots_of(self, positions: Tensor) -> Tensor:
        """The slot of each position in its row's high tier."""
        return torch.where(positions < self.sinks, positions, self.sinks + (positions - self.sinks) % self.ring)


@dataclass(frozen=True)
class Staged:
    """Keys and values of a step's tokens, bf16 [layers, room, kv_heads, D]: normalised, with RoPE, not rotated.

    Attributes:
        key_scale: [layers, 1, D] fp32, what keys are divided by before they are rotated.
    """

    k: Tensor
    v: Tensor
    key_scale: Tensor


@dataclass(frozen=True)
class Change:
    """What moves in one row between two steps.

    Attributes:
        page: the first of the row's own pages of the high tier. Its own pages follow one another.
        first: position of the first token that leaves.
        places: (bits, page, unit of the page) of each 32 tokens that leave.
        past: tokens at positions below it are in the high tier, others are staged.
        staged: index of the staged token at position 0; may be negative.
        order: [32 * places] int64: token i of the places is at position first + order[i]. None: i.
        stay: positions of staged tokens that go to the high tier.
    """

    page: int
    first: int
    places: Sequence[tuple[int, int, int]]
    past: int
    staged: int
    order: Tensor | None
    stay: Sequence[int]


def why_not(
    device: torch.device,
    x: Tensor,
    v: Tensor | None,
    rows: Tensor,
    positions: Tensor,
    num_tokens: Tensor | None,
    beside: Sequence[Tensor] = (),
) -> str | None:
    """For heads x [T, heads, head_dim]; and for values, norms, cosines and sines beside them."""
    if any(t is not None and t.dtype != torch.bfloat16 for t in (x, v, *beside)):
        return "heads, values, norms, cosines or sines are not bf16"
    if not rows.dtype == positions.dtype == torch.int64:
        return "rows or positions are not int64"
    if num_tokens is not None and num_tokens.dtype != torch.int32:
        return "num_tokens is not int32"
    if not all(t.is_contiguous() for t in (*beside, rows, positions)):
        return "norms, cosines, sines, rows or positions are not contiguous"
    if len(x) == 0:
        return "no tokens"
    if not all(t is None or (t.is_contiguous() and t.data_ptr() % 16 == 0) for t in (x, v)):
        return "a tensor is not contiguous, or not aligned to 16 bytes"
    return _why_not(device, x.shape[-1])


def why_not_move(device: torch.device, high: Layers) -> str | None:
    return _why_not(device, high.together.head_dim)


def _why_not(device: torch.device, D: int) -> str | None:
    if D != HEAD_DIM:
        return "head_dim is not 128"
    if device.type != "cuda":
        return "the device is no GPU"
    target = target_of(device)
    return target.reason if target.arch is None else None


def launch(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    eps: float,
    rope: tuple[Tensor, Tensor],
    ring: Ring,
    rows: Tensor,
    positions: Tensor,
    num_tokens: Tensor | None,
) -> Tensor:
    """Write keys and values of qkv [T, heads + 2 kv_heads, 128] into the high tier -> q [T, heads, 128].

    Args:
        q_norm, k_norm: [128]. rope: cos and sin [T, 1, 64]. All are bf16, as qkv.
        rows, positions: [T] int64. num_tokens: [] int32 on the device; later tokens are written nowhere. None: all T.
    """
    heads = qkv.shape[1] - 2 * ring.tier.kv_heads
    q = qkv.new_empty(len(qkv), heads, HEAD_DIM)
    cos, sin = rope
    given = (qkv, None, q_norm, k_norm, cos, sin, rows, positions, num_tokens, q)
    _write(ring, heads, eps, given, qkv.device)
    return q


def put(k: Tensor, v: Tensor, ring: Ring, rows: Tensor, positions: Tensor, num_tokens: Tensor | None) -> None:
    """Write keys and values [T, kv_heads, 128], normalised and with RoPE. Arguments as `launch`."""
    _write(ring, 0, 0.0, (k, v, None, None, None, None, rows, positions, num_tokens, None), k.device)


def _write(ring: Ring, heads: int, eps: float, given: tuple[Tensor | None, ...], device: torch.device) -> None:
    tier, x = ring.tier, given[0]
    assert x is not None
    sizes = len(x), heads, tier.kv_heads, tier.row_stride, ring.sinks, ring.ring
    with torch.cuda.device(device):
        _writer(given[1] is None, eps, sizes, tier.bits, tier.page, device)(
            load.stream(device.index),
            *map(load.pointer, given),
            ring.key_scale.data_ptr(),
            tier.payload.data_ptr(),
            tier.scales.data_ptr(),
            tier.token_ids.data_ptr() if ring.names else 0,
            tier.table.data_ptr(),
        )


def move(high: Layers, tiers: Sequence[Layers], ring: Ring, changes: Sequence[Change], staged: Staged | None) -> None:
    """Move tokens of rows to low tiers, then put staged ones into the high tier: two launches for all rows and layers.

    Args:
        tiers: all of them, ascending. ring: of any layer.
    """
    device, orders, units, stay = high.together.payload.device, [], [], []
    done = 0
    for change in changes:
        at = -1 if change.order is None else done
        for i, (bits, page, unit) in enumerate(change.places):
            first = change.first + (UNIT * i if at < 0 else 0)
            begin = at if at < 0 else at + UNIT * i
            units.append([BITS.index(bits), page, unit, first, begin, change.past, change.staged, change.page])
        if change.order is not None:
            orders.append(change.order)
            done += len(change.order)
        for p in change.stay:
            slot = p if p < ring.sinks else ring.sinks + (p - ring.sinks) % ring.ring
            page = high.together.page
            stay.append([change.page + slot // page, slot % page, p + change.staged, p])
    if not units and not stay:
        return
    words = [*(word for unit in units for word in unit), *(word for one in stay for word in one)]
    on_device = upload(torch.tensor(words, dtype=torch.int32), device)
    order = orders[0] if len(orders) == 1 else torch.cat(orders) if orders else None
    room = 0 if staged is None else staged.k.shape[1]
    given = (0, 0, 0) if staged is None else tuple(x.data_ptr() for x in (staged.k, staged.v, staged.key_scale))
    its = high.together
    with torch.cuda.device(device):
        stream = load.stream(device.index)
        if units:
            ends = addresses([layers.together for layers in tiers], "payload", "scales", "token_ids")
            of = {layers.together.bits: layers.pages for layers in tiers}
            pages = tuple(of.get(bits, 0) for bits in BITS)
            sizes = (high.pages, *pages, room, ring.sinks, ring.ring)
            _mover(len(units), len(high.each), its.kv_heads, its.bits, its.page, sizes, device)(
                stream,
                on_device.data_ptr(),
                load.pointer(order),
                *given,
                its.payload.data_ptr(),
                its.scales.data_ptr(),
                *ends,
            )
        if stay:
            _stayer(len(stay), len(high.each), its.kv_heads, its.bits, its.page, room, high.pages, device)(
                stream,
                on_device.data_ptr() + 32 * len(units),
                *given,
                *(its.payload.data_ptr(), its.scales.data_ptr(), its.token_ids.data_ptr()),
            )


@lru_cache(maxsize=1024)
def _writer(norm: bool, eps: float, sizes: tuple[int, ...], bits: int, page: int, device: torch.device) -> load.Launch:
    arch = target_of(device).arch
    assert arch is not None
    T, heads, kv_heads = sizes[:3]
    grid = (ceil_div(T * (heads + 2 * kv_heads), 4),)
    last = (c_float(eps), *map(c_int32, sizes))
    return load.Launch(write_spec(arch.name, norm, bits, page), device.index, grid, 128, *last, overlap=arch.overlaps)


@lru_cache(maxsize=1024)
def _mover(
    units: int, layers: int, kv_heads: int, bits: int, page: int, sizes: tuple[int, ...], device: torch.device
) -> load.Launch:
    arch = target_of(device).arch
    assert arch is not None
    one = tier_spec("units", arch.name, bits, page)
    return load.Launch(one, device.index, (units, kv_heads, layers), 256, *map(c_int32, sizes))


@lru_cache(maxsize=1024)
def _stayer(
    n: int, layers: int, kv_heads: int, bits: int, page: int, room: int, pages: int, device: torch.device
) -> load.Launch:
    arch = target_of(device).arch
    assert arch is not None
    one = tier_spec("stay", arch.name, bits, page)
    last = map(c_int32, (n, room, kv_heads, pages))
    return load.Launch(one, device.index, (ceil_div(2 * n * kv_heads, 8), layers), 256, *last)


def write_spec(arch: str, norm: bool, bits: int, page: int) -> spec.Spec:
    """The kernel that writes a token a row."""
    return spec.Spec.of("sm80/bucketed_write", arch, NORM=norm, HIGH=bits, PAGE=page)


def tier_spec(name: str, arch: str, bits: int, page: int) -> spec.Spec:
    """The kernel `units`, which fills units, or `stay`, which puts staged tokens into the high tier."""
    return spec.Spec.of(f"sm80/bucketed_{name}", arch, HIGH=bits, PAGE=page)
