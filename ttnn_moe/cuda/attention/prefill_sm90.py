"""Causal attention of packed prompts on Hopper: gpu_kernels/cuda/sm90/prefill_attention.cu."""

from __future__ import annotations

from ctypes import c_float, c_int32
from functools import lru_cache

import torch
from torch import Tensor

from .. import device as devices
from .. import maps
from ..arch import HOPPER, why_not_hopper, why_not_words
from ..jit import load, spec
from .memory import Memory, scale_of, why_not_kept

NAME = "CUDA C++ prefill_attention (sm_90a)"
HEAD_DIM, TILE = 128, 128
SHARED_MEMORY = 1024 + 6 * TILE * HEAD_DIM * 2 + 12 * 8
"""Bytes of a block: alignment to 1024 bytes, two tiles each of queries, keys and values, barriers."""


def why_not(
    device: torch.device, q: Tensor, memory: Memory, tiles: Tensor | None, out: Tensor | None = None
) -> str | None:
    """For q [T, heads, head_dim] and tiles of prefill.tiles_of, of 128 queries each."""
    if tiles is None:
        return "the step has no tiles"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return "neither bf16 nor fp16"
    if q.shape[2] != HEAD_DIM:
        return "head_dim is not 128"
    if q.shape[0] == 0:
        return "no tokens"
    page = memory.page
    if page % TILE and page not in (8, 16, 32, 64):
        return "a page is neither 8, 16, 32, 64 nor a multiple of 128 tokens"
    reason = why_not_hopper(device)
    if reason is not None:
        return reason
    return why_not_kept(q.dtype, memory) or why_not_words(q.dtype, q, *(() if out is None else (out,)))


def launch(q: Tensor, memory: Memory, tiles: Tensor, out: Tensor | None = None) -> Tensor:
    """As prefill.launch."""
    out = torch.empty_like(q) if out is None else out
    if len(tiles) == 0:
        return out
    heads, kv_heads, device = q.shape[1], memory.keys.shape[1], q.device
    box = min(memory.page or TILE, TILE)
    pages = memory.pages
    with torch.cuda.device(device):
        _launch(q.dtype, memory.page, heads, kv_heads, len(tiles) // 4, 0 if pages is None else pages.shape[1], device)(
            load.stream(device.index),
            maps.cache_map(memory.keys, box),
            maps.cache_map(memory.values, box),
            load.pointer(pages),
            tiles.data_ptr(),
            q.data_ptr(),
            out.data_ptr(),
        )
    return out


@lru_cache(maxsize=1024)
def _launch(
    dtype: torch.dtype, page: int, heads: int, kv_heads: int, tiles: int, pages_a_row: int, device: torch.device
) -> load.Launch:
    return load.Launch(
        spec_of(dtype, page, heads // kv_heads),
        device.index,
        (min(tiles * heads, devices.gpu(device).multiprocessors),),
        384,
        c_int32(tiles),
        c_int32(heads),
        c_int32(pages_a_row),
        c_float(scale_of(HEAD_DIM)),
        shared_memory=SHARED_MEMORY,
        overlap=True,
    )


def spec_of(dtype: torch.dtype, page: int, group: int) -> spec.Spec:
    """The kernel for pages of `page` keys (0: dense) and `group` query heads for each key/value head."""
    return spec.Spec.of("sm90/prefill_attention", HOPPER.name, FP16=dtype == torch.float16, PAGE=page, GROUP=group)
