"""Attention of prompts to packed tiers in CUDA C++: gpu_kernels/cuda/sm80/bucketed_prompt.cu."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float, c_int32
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...accelerator import upload
from ...sizes import ceil_div
from .. import device as devices
from ..arch import target_of
from ..jit import load, spec
from .bucketed import merge_launch
from .bucketed_write import tier_spec
from .memory import scale_of
from .tiers import BITS, UNIT, Tier, addresses, by_bits

NAME = "CUDA C++ bucketed_prompt (mma.sync)"
HEAD_DIM = 128
WARPS, ROWS = 4, 128
RESIDENT, MOST_SPLITS = 2, 8
"""Blocks of a multiprocessor; parts of a row's keys."""

SHARED_MEMORY = ROWS * 2 * HEAD_DIM + 3 * (16384 + 128)
"""Bytes of a block: queries, and three units of tokens."""


@dataclass(frozen=True)
class Own:
    """A step's tokens of some prompts, for one layer at a time, in pages of a tier of 16 bits.

    Attributes:
        payload, scales, ids: as Tier's. puts: [tokens, 4] int32: page, slot, index in the step, position.
        pages: the first page of each prompt.
    """

    payload: Tensor
    scales: Tensor
    ids: Tensor
    puts: Tensor
    pages: tuple[int, ...]

    @classmethod
    def of(cls, spans: Sequence[tuple[int, int]], kv_heads: int, page: int, device: torch.device) -> Own:
        """For prompts of (index of the first token in the step, tokens). page: of the tiers beside them."""
        puts, pages, done = [], [], 0
        for first, n in spans:
            i = torch.arange(n, dtype=torch.int32)
            puts.append(torch.stack((done + i // page, i % page, first + i, i), 1))
            pages.append(done)
            done += ceil_div(n, page)
        return cls(
            torch.empty(done, kv_heads, 2, page * HEAD_DIM * 2, dtype=torch.uint8, device=device),
            torch.empty(done, kv_heads, page // UNIT, 8, 4, 2, dtype=torch.float16, device=device),
            torch.empty(done, page, dtype=torch.int32, device=device),
            upload(torch.cat(puts), device),
            tuple(pages),
        )

    def pack(self, k: Tensor, v: Tensor, key_scale: Tensor) -> None:
        """Rotate and pack keys and values [T, kv_heads, 128] of a step. key_scale: [128] fp32, as Ring's."""
        n, kv_heads, device = len(self.puts), k.shape[1], k.device
        with torch.cuda.device(device):
            _packer(n, kv_heads, self.ids.shape[1], device)(
                load.stream(device.index),
                *(self.puts.data_ptr(), k.data_ptr(), v.data_ptr(), key_scale.data_ptr()),
                *(self.payload.data_ptr(), self.scales.data_ptr(), self.ids.data_ptr()),
            )


def why_not_heads(device: torch.device, dtype: torch.dtype, D: int, page: int) -> str | None:
    """Whether Own serves prompts of these heads, and the kernel tiers of these pages."""
    if D != HEAD_DIM:
        return "head_dim is not 128"
    if dtype != torch.bfloat16:
        return "the queries are not bf16"
    if page % 64:
        return "a page is no multiple of 64 tokens"
    if device.type != "cuda":
        return "the device is no GPU"
    target = target_of(device)
    if target.arch is None:
        return target.reason
    return None if target.arch.shared_memory >= SHARED_MEMORY else "it needs more shared memory"


def launch(
    q: Tensor,
    at: Tensor,
    own: Own,
    which: int,
    count: int,
    tiers: Sequence[Tier],
    row: int,
    q_scale: Tensor | None,
    splits: int | None = None,
) -> Tensor:
    """Causal attention of q [n, heads, 128] to the piece's own tokens, and to all tokens of the tiers -> as q.

    Args:
        at: [n] int64, ascending: which token of the piece each query is.
        own: holds the layer's keys and values. which: the piece. count: its tokens.
        tiers: of one layer, rotated. row: of their tables.
        q_scale: [128] fp32, which q is multiplied by before it is rotated. None: 1.
        splits: blocks that share the keys. None: splits_of.
    """
    q = q.contiguous()
    n, heads, D = q.shape
    kv_heads, device, out = tiers[0].kv_heads, q.device, torch.empty_like(q)
    places = addresses(tiers, "payload", "scales", "table", "counts")
    wide = by_bits(tiers, lambda tier: tier.row_stride)
    page, keys = own.pages[which], sum(tier.capacity for tier in tiers)
    splits = splits or splits_of(n * heads, kv_heads, keys, devices.gpu(device).multiprocessors)
    partial = lse = None
    if splits > 1:
        partial = q.new_empty(n, heads, splits, D, dtype=torch.float32)
        lse = q.new_empty(n, heads, splits, dtype=torch.float32)
    attend, join = _launches(n, heads // kv_heads, kv_heads, tiers[0].page, wide, splits, device)
    with torch.cuda.device(device):
        stream = load.stream(device.index)
        attend(
            *(stream, q.data_ptr(), load.pointer(q_scale), out.data_ptr(), load.pointer(partial), load.pointer(lse)),
            *(at.data_ptr(), own.payload[page].data_ptr(), own.scales[page].data_ptr(), *places, count, row),
        )
        if join is not None:
            join(stream, load.pointer(partial), load.pointer(lse), out.data_ptr(), 0)
    return out


def splits_of(rows: int, kv_heads: int, keys: int, multiprocessors: int) -> int:
    """Blocks that share the keys of ROWS queries: as many as fill the GPU once, of at least 512 keys each.

    Args:
        rows: queries times heads. keys: of the row, at most.
    """
    blocks = ceil_div(rows // kv_heads, ROWS) * kv_heads
    return max(1, min(MOST_SPLITS, RESIDENT * multiprocessors // blocks, keys // 512))


@lru_cache(maxsize=1024)
def _launches(
    n: int, group: int, kv_heads: int, page: int, wide: tuple[int, ...], splits: int, device: torch.device
) -> tuple[load.Launch, load.Launch | None]:
    """Of attention, and of the merge of splits."""
    arch = target_of(device).arch
    assert arch is not None
    attend = load.Launch(
        spec_of(arch.name, group, page, wide),
        device.index,
        (ceil_div(n * group, ROWS), kv_heads, splits),
        32 * WARPS,
        *map(c_int32, (n, *wide)),
        c_float(scale_of(HEAD_DIM)),
        shared_memory=SHARED_MEMORY,
    )
    if splits == 1:
        return attend, None
    return attend, merge_launch(device, n * group * kv_heads, splits, True)


@lru_cache(maxsize=1024)
def _packer(n: int, kv_heads: int, page: int, device: torch.device) -> load.Launch:
    arch = target_of(device).arch
    assert arch is not None
    last = map(c_int32, (n, 0, kv_heads, 0))
    grid = (ceil_div(2 * n * kv_heads, 8), 1)
    return load.Launch(tier_spec("stay", arch.name, 16, page), device.index, grid, 256, *last)


def spec_of(arch: str, group: int, page: int, wide: Sequence[int]) -> spec.Spec:
    """The kernel for `group` query heads a key/value head, and tiers of `wide` pages a row, by BITS."""
    tiers = sum(1 << bits for bits, pages in zip(BITS, wide, strict=True) if pages)
    return spec.Spec.of("sm80/bucketed_prompt", arch, GROUP=group, PAGE=page, TIERS=tiers)
