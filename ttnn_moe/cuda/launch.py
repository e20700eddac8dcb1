"""Launching the Triton kernels of gpu_kernels/triton: buffers, grids, arguments. Inputs were checked before."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..contract import Experts, Routing
from ..sizes import power_of_2
from .tiles import Few, Gemm, Sorted

_INT_ALIGN = 4  # int32 words of 16 bytes: Triton compiles another kernel for pointers that are aligned less


@dataclass(frozen=True)
class SortedRows:
    """What routing_sort writes; int32, see gpu_kernels/triton/routing_sort.py."""

    offsets: Tensor
    row_tokens: Tensor
    inverse: Tensor
    tiles: Tensor
    num_tiles: Tensor
    tiles_bound: int


@dataclass(frozen=True)
class Selection:
    """The routing of one call as the kernels read it.

    Attributes:
        ids: [T, K] int32 or int64. weights: [T, K] fp32. num_tokens: [] int32 or None.
        expert_map: [E_ids] int32 or None: local index of each expert that ids can name.
        E_ids: ids outside 0 .. E_ids-1 name no expert.
    """

    ids: Tensor
    weights: Tensor
    num_tokens: Tensor | None
    expert_map: Tensor | None
    E_ids: int

    @classmethod
    def of(cls, routing: Routing, expert_map: Tensor | None = None) -> Selection:
        return cls(routing.topk_ids, routing.topk_weights, routing.num_tokens, expert_map, routing.E)

    @property
    def T(self) -> int:
        return self.ids.shape[0]

    @property
    def K(self) -> int:
        return self.ids.shape[1]


def tiles_bound(rows: int, E: int, m: int) -> int:
    """Tiles of m rows that any routing of `rows` sorted rows to E experts can need."""
    return min(-(-rows // m) + min(E, rows), rows)


def _sections(P: int, E: int, plan: Sorted) -> list[int]:
    """Words of offsets, row_tokens, inverse, tiles, num_tiles and counts."""
    chunks = _blocks(P, _chunk(P, plan))
    sizes = (E + 1, P, P, 2 * tiles_bound(P, E, plan.m), 1, chunks * _padded(E) if chunks > 1 else 0)
    return [_aligned(n) for n in sizes]


def sort_words(P: int, E: int, plan: Sorted) -> int:
    """int32 words that the sort of P pairs writes."""
    return sum(_sections(P, E, plan))


def _padded(E: int) -> int:
    return max(power_of_2(E), 32)


def _chunk(P: int, plan: Sorted) -> int:
    return min(plan.sort_chunk, max(power_of_2(P), 128))


def sort(selection: Selection, E: int, plan: Sorted, words: Tensor | None = None) -> SortedRows:
    """Sort pairs by local expert, E of them; words: int32, sort_words or more, to write to."""
    from ttnn_moe.gpu_kernels.triton.routing_sort import routing_count, routing_sort

    P, bound = selection.ids.numel(), tiles_bound(selection.ids.numel(), E, plan.m)
    chunk = _chunk(P, plan)
    chunks = _blocks(P, chunk)
    sizes = _sections(P, E, plan)
    if words is None:
        words = torch.empty(sum(sizes), dtype=torch.int32, device=selection.ids.device)
    offsets, row_tokens, inverse, tiles, num_tiles, counts = words[: sum(sizes)].split(sizes)
    ids = (selection.ids, selection.expert_map, selection.num_tokens)
    options = {
        "HAS_MAP": selection.expert_map is not None,
        "HAS_BOUND": selection.num_tokens is not None,
        "E_PAD": _padded(E),
        "CHUNK": chunk,
        "num_warps": max(4, min(8, chunk // 128)),
    }
    if chunks > 1:
        routing_count[(chunks,)](*ids, counts, P, selection.E_ids, selection.K, **options)
    routing_sort[(E, chunks)](
        *ids,
        counts,
        offsets,
        row_tokens,
        inverse,
        tiles,
        num_tiles,
        P,
        selection.E_ids,
        E,
        selection.K,
        chunks,
        COUNTED=chunks > 1,
        BLOCK_M=plan.m,
        **options,
    )
    return SortedRows(offsets, row_tokens, inverse, tiles, num_tiles, bound)


def gate_up(hidden: Tensor, experts: Experts, rows: SortedRows, act: Tensor, m: int, tile: Gemm) -> None:
    """act[row] = silu(x Wg) * (x Wu) of every sorted row."""
    from ttnn_moe.gpu_kernels.triton import gate_up as kernel

    H, I = experts.H, experts.I
    view = _halves(experts)
    kernel.gate_up[(rows.tiles_bound * _blocks(I, tile.n),)](
        hidden,
        view.gate,
        view.up,
        rows.offsets,
        rows.row_tokens,
        rows.tiles,
        rows.num_tiles,
        act,
        H,
        I,
        view.rows_of_expert,
        view.row_stride,
        BLOCK_M=m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        EVEN_K=H % tile.k == 0,
        PRECISION=_precision(hidden),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def project(hidden: Tensor, experts: Experts, which: str, rows: SortedRows, out: Tensor, m: int, tile: Gemm) -> None:
    """out[row] = x Wg (which="gate") or x Wu ("up") of every sorted row."""
    view = _halves(experts)
    _grouped(
        hidden,
        view.gate if which == "gate" else view.up,
        view.rows_of_expert,
        view.row_stride,
        rows,
        out,
        m,
        tile,
        gather=True,
    )


def down(act: Tensor, experts: Experts, rows: SortedRows, out: Tensor, m: int, tile: Gemm) -> None:
    """out[row] = act[row] Wd of every sorted row."""
    _grouped(act, experts.tensors["down"], experts.H, experts.I, rows, out, m, tile, gather=False)


def _grouped(
    x: Tensor,
    weights: Tensor,
    rows_of_expert: int,
    row_stride: int,
    rows: SortedRows,
    out: Tensor,
    m: int,
    tile: Gemm,
    gather: bool,
) -> None:
    from ttnn_moe.gpu_kernels.triton.grouped_matmul import grouped_matmul

    M, N = x.shape[1], out.shape[1]
    grouped_matmul[(rows.tiles_bound * _blocks(N, tile.n),)](
        x,
        weights,
        rows.offsets,
        rows.row_tokens,
        rows.tiles,
        rows.num_tiles,
        out,
        M,
        N,
        rows_of_expert,
        row_stride,
        BLOCK_M=m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        GATHER=gather,
        EVEN_K=M % tile.k == 0,
        PRECISION=_precision(x),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def combine(
    rows: Tensor,
    inverse: Tensor,
    weights: Tensor,
    num_tokens: Tensor | None,
    out: Tensor,
    accumulate: bool,
    block_h: int,
) -> None:
    """out[t] (+)= sum over k of weights[t, k] * rows[inverse[t, k]]."""
    from ttnn_moe.gpu_kernels.triton import combine as kernel

    (T, K), H = weights.shape, out.shape[1]
    block = min(block_h, power_of_2(H))
    kernel.combine[(T, _blocks(H, block))](
        rows,
        inverse,
        weights,
        num_tokens,
        out,
        H,
        K=K,
        HAS_BOUND=num_tokens is not None,
        ADD=accumulate,
        BLOCK_H=block,
        num_warps=max(1, min(8, block // 256)),
    )


def few(
    hidden: Tensor, experts: Experts, selection: Selection, act: Tensor, out: Tensor, accumulate: bool, plan: Few
) -> None:
    """The whole operator of few pairs: act [T*K, I] is scratch."""
    from ttnn_moe.gpu_kernels.triton.few_down import few_down
    from ttnn_moe.gpu_kernels.triton.few_gate_up import few_gate_up

    T, K, H, I = selection.T, selection.K, experts.H, experts.I
    view = _halves(experts)
    bound, table = selection.num_tokens, selection.expert_map
    tile = plan.gate_up
    few_gate_up[(_blocks(I, tile.n), T * K)](
        hidden,
        view.gate,
        view.up,
        selection.ids,
        table,
        bound,
        act,
        selection.E_ids,
        K,
        H,
        I,
        view.rows_of_expert,
        view.row_stride,
        HAS_MAP=table is not None,
        HAS_BOUND=bound is not None,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    tile = plan.down
    few_down[(_blocks(H, tile.n), T)](
        act,
        experts.tensors["down"],
        selection.ids,
        table,
        bound,
        selection.weights,
        out,
        selection.E_ids,
        H,
        I,
        K=K,
        HAS_MAP=table is not None,
        HAS_BOUND=bound is not None,
        ADD=accumulate,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )


def silu_mul(gate: Tensor, up: Tensor, out: Tensor) -> None:
    """out = silu(gate) * up."""
    from ttnn_moe.gpu_kernels.triton import silu_mul as kernel

    n = out.numel()
    if n:
        kernel.silu_mul[(_blocks(n, 1024),)](gate, up, out, n, BLOCK=1024)


@dataclass(frozen=True)
class _Halves:
    """gate and up rows of gate_up [E, 2I, H] as two views with one row arithmetic."""

    gate: Tensor
    up: Tensor
    rows_of_expert: int
    row_stride: int


def _halves(experts: Experts) -> _Halves:
    weight, H, I = experts.tensors["gate_up"], experts.H, experts.I
    if experts.gate_up_order == "interleaved":
        return _Halves(weight, weight[:, 1:], I, 2 * H)
    return _Halves(weight, weight[:, I:], 2 * I, H)


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _blocks(n: int, size: int) -> int:
    return -(-n // size)


def _aligned(n: int) -> int:
    return _blocks(n, _INT_ALIGN) * _INT_ALIGN
