"""Attention of prompts on Hopper: gpu_kernels/cuda/sm90/prefill_attention.cu."""

from __future__ import annotations

from ctypes import c_float, c_int32
from functools import lru_cache

import torch
from torch import Tensor

from ttnn_moe.cuda.device import gpu
from ttnn_moe.cuda.jit import load
from ttnn_moe.cuda.jit.spec import Spec

from .decode_linear import on_hopper
from .ops import Place, attention_scale

HEAD_DIM, TILE = 128, 128
SHARED_MEMORY = 1024 + 6 * TILE * HEAD_DIM * 2 + 12 * 8
"""Bytes of a block: to begin at a multiple of 1024, two tiles each of queries, keys and values, barriers."""


def serves(q: Tensor, place: Place) -> bool:
    """Whether q [T, heads, head_dim] and a cache are on a GPU, of a dtype and of sizes that the kernel takes, and lie
    as it reads them. A tile of queries is then one of ops.prefill_tiles."""
    page = place.page
    return (
        q.is_cuda
        and q.shape[0] > 0
        and q.shape[2] == HEAD_DIM
        and q.dtype in (torch.bfloat16, torch.float16)
        and (page == 0 or page % TILE == 0 or page in (8, 16, 32, 64))
        and all(
            t.dtype == q.dtype and t.is_contiguous() and t.data_ptr() % 16 == 0 for t in (q, place.keys, place.values)
        )
        and on_hopper(q.device.index)
    )


def prefill_attention(q: Tensor, place: Place, tiles: Tensor, out: Tensor | None = None) -> Tensor:
    """Causal attention of packed prompts q [T, heads, 128] to the keys of their rows; see ops.prefill_attention."""
    from ttnn_moe.cuda.maps import cache_map

    out = torch.empty_like(q) if out is None else out
    if len(tiles) == 0:
        return out
    heads, kv_heads, index = q.shape[1], place.keys.shape[1], q.device.index
    box = min(place.page or TILE, TILE)
    pages = place.pages
    with torch.cuda.device(q.device):
        _launch(q.dtype, place.page, heads, kv_heads, len(tiles), 0 if pages is None else pages.shape[1], index)(
            load.stream(index),
            cache_map(place.keys, box),
            cache_map(place.values, box),
            0 if pages is None else pages.data_ptr(),
            tiles.data_ptr(),
            q.data_ptr(),
            out.data_ptr(),
        )
    return out


@lru_cache(maxsize=1024)
def _launch(
    dtype: torch.dtype, page: int, heads: int, kv_heads: int, tiles: int, pages_a_row: int, device: int
) -> load.Launch:
    return load.Launch(
        spec_of(dtype, page, heads // kv_heads),
        device,
        (min(tiles * heads, gpu(device).multiprocessors),),
        384,
        c_int32(tiles),
        c_int32(heads),
        c_int32(pages_a_row),
        c_float(attention_scale(HEAD_DIM)),
        shared_memory=SHARED_MEMORY,
        overlap=True,
    )


def spec_of(dtype: torch.dtype, page: int, group: int) -> Spec:
    """The kernel for pages of so many keys (0: dense), and so many query heads to one of keys."""
    return Spec.of("sm90/prefill_attention", "sm_90a", FP16=dtype == torch.float16, PAGE=page, GROUP=group)
