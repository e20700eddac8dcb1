"""Launching the Triton kernels of the model: grids, tiles, arguments. ops.py decides when; tensors are contiguous."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ttnn_moe.cuda.device import gpu
from ttnn_moe.sizes import power_of_2

from .ops import HeadNorms, Place, attention_scale

MAX_SPLITS = 64


@dataclass(frozen=True)
class Tile:
    """Constants, warps and pipeline stages of a kernel's launch (where STAGES is no constant)."""

    constants: dict[str, int]
    warps: int
    stages: int = 3

    def within(self, page: int) -> Tile:
        """For keys in pages (page > 0: a power of two, at least 16): those of one at a time. Triton shares stages out
        between reading a page's number and reading the page."""
        if page == 0:
            return self
        changes = {"BLOCK_N": min(self.constants["BLOCK_N"], page), "STAGES": 2 * self.constants["STAGES"] - 1}
        return replace(self, constants={**self.constants, **changes})


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from ttnn_moe.gpu_kernels.triton import rms_norm as kernel

    out = torch.empty_like(x)
    T, H = x.shape
    if T:
        block = power_of_2(H)
        most = 8 if T < 2048 else 2  # of few rows each is to end soon, of many all
        kernel.rms_norm[(T,)](x, weight, out, eps, H, BLOCK=block, num_warps=max(1, min(most, block // 256)), **_pdl(x))
    return out


def few_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    normed: Tensor | None = None,
) -> Tensor:
    """See gpu_kernels/triton/few_linear.py: 4 rows or fewer. With a residual, that is the output."""
    from ttnn_moe.gpu_kernels.triton import few_linear as kernel

    (T, K), N = x.shape, weight.shape[0]
    out = residual if residual is not None else x.new_empty(T, N)
    block_n, block_k, warps = few_linear_tile(T, N, K)
    kernel.few_linear[(-(-N // block_n),)](
        x,
        norm,
        weight,
        bias,
        residual,
        out,
        normed,
        eps,
        N,
        T=T,
        K=K,
        NORM=norm is not None,
        BIAS=bias is not None,
        ADD=residual is not None,
        KEEP=normed is not None,
        T_PAD=power_of_2(T),
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=warps,
        **_pdl(x),
    )
    return out


def few_linear_tile(T: int, N: int, K: int) -> tuple[int, int, int]:
    """(BLOCK_N, BLOCK_K, warps): rows of the weight per program so that there are programs for every multiprocessor."""
    block_n = 4 if N >= 2048 else 2
    block_k = min(2048 if T <= 2 else 512, power_of_2(K))
    return block_n, block_k, max(1, min(8, block_k // 256))


def head_norm_rope(qkv: Tensor, kv_heads: int, norms: HeadNorms, rope: tuple[Tensor, Tensor], place: Place) -> Tensor:
    from ttnn_moe.gpu_kernels.triton import head_norm_rope as kernel

    T, rows, D = qkv.shape
    heads = rows - 2 * kv_heads
    q = qkv.new_empty(T, heads, D)
    cos, sin = rope
    block = 1 if T * rows <= 2048 else 16
    kernel.head_norm_rope[(-(-T * rows // block),)](
        qkv.contiguous(),
        norms.q,
        norms.k,
        cos,
        sin,
        place.rows,
        place.positions,
        place.num_tokens,
        q,
        place.keys,
        place.values,
        place.pages,
        norms.eps,
        T,
        place.capacity,
        Q=heads,
        KV=kv_heads,
        D=D,
        BOUND=place.num_tokens is not None,
        BLOCK_R=block,
        PAGE=place.page,
        num_warps=1 if block == 1 else 4,
        **_pdl(qkv),
    )
    return q


def router_topk(logits: Tensor, K: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    from ttnn_moe.gpu_kernels.triton import router_topk as kernel

    T, E = logits.shape
    ids, weights = _chosen(logits, T, K)
    kernel.router_topk[(T,)](
        logits,
        None,
        None,
        None,
        None,
        None,
        ids,
        weights,
        0.0,
        T,
        E,
        0,
        K=K,
        RENORMALISE=renormalise,
        SLICES=0,
        E_PAD=power_of_2(E),
        K_PAD=power_of_2(K),
        S_PAD=1,
        H_PAD=1,
        num_warps=_topk_warps(E),
        **_pdl(logits),
    )
    return ids, weights


def router(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, K: int, renormalise: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """ids and weights [T, K] of x [T, H], and x normalised: router_logits, then router_topk."""
    from ttnn_moe.gpu_kernels.triton import router_logits as logits_kernel
    from ttnn_moe.gpu_kernels.triton import router_topk as kernel

    (T, H), E = x.shape, weight.shape[0]
    tile = router_tile(T, x.element_size())
    slices = -(-H // tile.constants["BLOCK_H"])
    partial = x.new_empty(slices, T, E, dtype=torch.float32)
    squares = x.new_empty(slices, T, dtype=torch.float32)
    grid = (-(-E // tile.constants["BLOCK_E"]), slices, -(-T // tile.constants["BLOCK_T"]))
    logits_kernel.router_logits[grid](
        x,
        norm,
        weight,
        partial,
        squares,
        T,
        E,
        H,
        PRECISION=_precision(x),
        **tile.constants,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **_pdl(x),
    )
    ids, weights = _chosen(x, T, K)
    normed = torch.empty_like(x)
    kernel.router_topk[(T,)](
        None,
        partial,
        squares,
        x,
        norm,
        normed,
        ids,
        weights,
        eps,
        T,
        E,
        H,
        K=K,
        RENORMALISE=renormalise,
        SLICES=slices,
        E_PAD=power_of_2(E),
        K_PAD=power_of_2(K),
        S_PAD=power_of_2(slices),
        H_PAD=power_of_2(H),
        num_warps=_topk_warps(E),
        **_pdl(x),
    )
    return ids, weights, normed


def router_tile(T: int, itemsize: int) -> Tile:
    """Of router_logits; from an H200's times."""
    block_h = 512 // itemsize
    if T <= 32:
        return Tile({"BLOCK_T": max(16, power_of_2(T)), "BLOCK_E": 16, "BLOCK_H": block_h}, 4, 1)
    if T <= 64:
        return Tile({"BLOCK_T": 32, "BLOCK_E": 32, "BLOCK_H": block_h}, 4, 1)
    return Tile({"BLOCK_T": 64, "BLOCK_E": 64, "BLOCK_H": block_h}, 8, 1)


def _topk_warps(E: int) -> int:
    """One warp has the least to say to itself."""
    return 1 if E <= 512 else 4


def _chosen(x: Tensor, T: int, K: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(T, K, dtype=torch.int32), x.new_empty(T, K, dtype=torch.float32)


def decode_attention(q: Tensor, place: Place, out: Tensor | None = None) -> Tensor:
    from ttnn_moe.gpu_kernels.triton import decode_attention as kernel
    from ttnn_moe.gpu_kernels.triton.merge_attention import merge_attention

    T, heads, D = q.shape
    kv_heads, capacity = place.keys.shape[1], place.capacity
    splits = decode_splits(T, kv_heads, capacity, processors(q.device))
    out = torch.empty_like(q) if out is None else out
    partial = lse = None
    if splits > 1:
        partial = q.new_empty(T, heads, splits, D, dtype=torch.float32)
        lse = q.new_empty(T, heads, splits, dtype=torch.float32)
    group, tile = heads // kv_heads, decode_tile(D, q.element_size()).within(place.page)
    kernel.decode_attention[(T, kv_heads, splits)](
        q,
        place.keys,
        place.values,
        place.pages,
        place.rows,
        place.positions,
        place.num_tokens,
        out,
        partial,
        lse,
        attention_scale(D),
        capacity,
        KV=kv_heads,
        G=group,
        D=D,
        SPLITS=splits,
        BOUND=place.num_tokens is not None,
        PRECISION=_precision(q),
        G_PAD=max(16, power_of_2(group)),
        PAGE=place.page,
        **tile.constants,
        num_warps=tile.warps,
        **_pdl(q),
    )
    if splits > 1:
        merge_attention[(T * heads,)](partial, lse, out, D=D, SPLITS=splits, num_warps=4, **_pdl(q))
    return out


def decode_tile(D: int, itemsize: int) -> Tile:
    """Of decode_attention: within the 99 KiB of shared memory that the least of GPUs has."""
    return Tile({"BLOCK_N": 64 if D * itemsize <= 256 else 32, "STAGES": 3 if D * itemsize <= 512 else 2}, 4)


def prefill_tile(D: int, itemsize: int) -> Tile:
    """Of prefill_attention: within 99 KiB too, and within 227 KiB on Hopper, where queries also lie in it."""
    if D * itemsize <= 256:
        return Tile({"BLOCK_M": 128, "BLOCK_N": 64, "STAGES": 3}, 8)
    if D * itemsize <= 512:
        return Tile({"BLOCK_M": 64, "BLOCK_N": 32, "STAGES": 2}, 4)
    return Tile({"BLOCK_M": 32, "BLOCK_N": 16, "STAGES": 2}, 4)


def decode_splits(T: int, kv_heads: int, capacity: int, processors: int) -> int:
    """Parts of the keys, a power of two: programs for twice the multiprocessors, of 128 keys or more each."""
    if capacity <= 512:
        return 1  # merging would cost more than it saves
    splits = 1
    while splits < MAX_SPLITS and 2 * splits * T * kv_heads <= 2 * processors and 2 * splits * 128 <= capacity:
        splits *= 2
    return splits


def prefill_attention(q: Tensor, place: Place, tiles: Tensor, out: Tensor | None = None) -> Tensor:
    from ttnn_moe.gpu_kernels.triton import prefill_attention as kernel

    T, heads, D = q.shape
    kv_heads = place.keys.shape[1]
    out = torch.empty_like(q) if out is None else out
    tile = prefill_tile(D, q.element_size()).within(place.page)
    kernel.prefill_attention[(heads, len(tiles))](
        q,
        place.keys,
        place.values,
        place.pages,
        tiles,
        out,
        attention_scale(D),
        place.capacity,
        KV=kv_heads,
        G=heads // kv_heads,
        D=D,
        PRECISION=_precision(q),
        PAGE=place.page,
        **tile.constants,
        num_warps=tile.warps,
    )
    return out


def prefill_tiles(spans: Iterable[tuple[int, int, int, int]], rows: int) -> list[tuple[int, int, int, int]]:
    """Tiles of prefill_attention, of `rows` queries (prefill_tile's BLOCK_M), for spans (first token, tokens, past,
    cache row); those with most keys first."""
    tiles = [(first + m, min(rows, n - m), past + m, row) for first, n, past, row in spans for m in range(0, n, rows)]
    return sorted(tiles, key=lambda tile: -tile[2])


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _pdl(x: Tensor) -> dict[str, bool]:
    """Programmatic dependent launch, where the GPU has it."""
    if x.is_cuda and gpu(x.device).capability[0] >= 9:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def processors(device: torch.device) -> int:
    """Multiprocessors; 132 (an H200's) where Triton's interpreter stands for a GPU."""
    return gpu(device).multiprocessors
