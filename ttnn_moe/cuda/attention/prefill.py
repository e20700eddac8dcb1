"""Causal attention of packed prompts: gpu_kernels/triton/prefill_attention.py; and the tiles of its work."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..arch import has_warpgroups
from ..triton_launch import Tile, precision
from .memory import Memory, scale_of, why_not_q, within

NAME = "Triton prefill_attention"


def why_not(q: Tensor, memory: Memory, tiles: Tensor | None, out: Tensor | None = None) -> str | None:
    """Why the kernel does not attend q to this memory; None: it does. tiles: of the step's prompts."""
    return "the step has no tiles" if tiles is None else why_not_q(q, memory, out)


def launch(q: Tensor, memory: Memory, tiles: Tensor, out: Tensor | None = None) -> Tensor:
    """Attention of q [T, heads, head_dim] to the keys of its rows.

    Args:
        tiles: [4 n] int32, see tiles_of.
        out: as q, to write the result to; tokens of no tile stay as they are.
    """
    from ttnn_moe.gpu_kernels.triton import prefill_attention as kernel

    _, heads, D = q.shape
    kv_heads = memory.keys.shape[1]
    out = torch.empty_like(q) if out is None else out
    of = within(tile(D, q.element_size(), has_warpgroups(q.device)), memory.page)
    kernel.prefill_attention[(heads, len(tiles) // 4)](
        *(q, memory.keys, memory.values, memory.pages, tiles, out, scale_of(D), memory.capacity),
        KV=kv_heads,
        G=heads // kv_heads,
        D=D,
        PRECISION=precision(q),
        PAGE=memory.page,
        STRIDE=memory.stride,
        **of.constants,
        num_warps=of.warps,
    )
    return out


def tile(D: int, itemsize: int, warpgroups: bool = True) -> Tile:
    """Within 99 KiB of shared memory; on Hopper, where it also holds the queries, within 227 KiB.

    Args:
        warpgroups: whether products are of warpgroups, as on Hopper, or of warps. BLOCK_M does not depend on it.
    """
    if D * itemsize <= 256:
        if warpgroups or itemsize > 2:
            return Tile({"BLOCK_M": 128, "BLOCK_N": 64, "STAGES": 3}, 8)
        # for 4,096 tokens 455 us, where the other takes 518: an H100 with sm_80 code
        return Tile({"BLOCK_M": 128, "BLOCK_N": 32, "STAGES": 3}, 4)
    if D * itemsize <= 512:
        return Tile({"BLOCK_M": 64, "BLOCK_N": 32, "STAGES": 2}, 4)
    return Tile({"BLOCK_M": 32, "BLOCK_N": 16, "STAGES": 2}, 4)


def queries_of(D: int, itemsize: int) -> int:
    """Queries of a tile."""
    return tile(D, itemsize).constants["BLOCK_M"]


def tiles_of(spans: Iterable[tuple[int, int, int, int]], queries: int) -> list[int]:
    """Four words a tile (first token, queries, keys before the first query, cache row); longest first.

    Args:
        spans: (first token, tokens, past, cache row) of each sequence.
        queries: of a tile, at most.
    """
    tiles = [
        (first + m, min(queries, n - m), past + m, row) for first, n, past, row in spans for m in range(0, n, queries)
    ]
    tiles.sort(key=lambda tile: -tile[2])
    return [word for tile in tiles for word in tile]
