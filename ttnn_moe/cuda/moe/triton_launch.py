"""Launches of the Triton kernels of gpu_kernels/triton: buffers, grids, arguments. The caller checks inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ...contract import Experts, Routing
from ...sizes import ceil_div, power_of_2
from ..triton_launch import precision
from .family import Call
from .pairs import tiles_bound
from .triton_tiles import FewTiles, SortedTiles, TritonTile

LEAST_TILE, LEAST_CHUNK = 16, 2048  # of any problem's tiles
_INT_ALIGN = 4  # int32 words of 16 bytes: Triton compiles another kernel for pointers of less alignment


@dataclass(frozen=True)
class SortedRows:
    """What routing_sort writes; int32, see gpu_kernels/triton/routing_sort.py."""

    offsets: Tensor
    row_tokens: Tensor
    inverse: Tensor
    tiles: Tensor
    num_tiles: Tensor
    tiles_bound: int


def _sections(P: int, E: int, m: int, chunk: int) -> list[int]:
    """Words of offsets, row_tokens, inverse, tiles, num_tiles and counts; chunk: pairs that a program reads."""
    chunks = ceil_div(P, chunk)
    sizes = (E + 1, P, P, 2 * tiles_bound(P, E, m), 1, chunks * _padded(E) if chunks > 1 else 0)
    return [ceil_div(n, _INT_ALIGN) * _INT_ALIGN for n in sizes]


def sort_words(P: int, E: int, tiles: SortedTiles) -> int:
    """int32 words that suffice for the sort of P pairs or fewer, with whatever tiles a problem of so many gets."""
    return sum(_sections(P, E, min(tiles.m, LEAST_TILE), min(tiles.sort_chunk, LEAST_CHUNK)))


def _padded(E: int) -> int:
    return max(power_of_2(E), 32)


def sort(routing: Routing, expert_map: Tensor | None, E: int, tiles: SortedTiles, words: Tensor) -> SortedRows:
    """Sort pairs by local expert, E of them; words: int32, sort_words or more, to write to."""
    from ttnn_moe.gpu_kernels.triton.routing_sort import routing_count, routing_sort

    P, K = routing.topk_ids.numel(), routing.K
    chunk = min(tiles.sort_chunk, max(power_of_2(P), 128))
    chunks, sizes = ceil_div(P, chunk), _sections(P, E, tiles.m, chunk)
    offsets, row_tokens, inverse, begins, num_tiles, counts = words[: sum(sizes)].split(sizes)
    rows = offsets, row_tokens, inverse, begins, num_tiles
    ids = routing.topk_ids, expert_map, routing.num_tokens
    options = {
        "HAS_MAP": expert_map is not None,
        "HAS_BOUND": routing.num_tokens is not None,
        "E_PAD": _padded(E),
        "CHUNK": chunk,
        "num_warps": max(4, min(8, chunk // 128)),
    }
    if chunks > 1:
        routing_count[(chunks,)](*ids, counts, P, routing.E, K, **options)
    routing_sort[(E, chunks)](
        *ids, counts, *rows, P, routing.E, E, K, chunks, COUNTED=chunks > 1, BLOCK_M=tiles.m, **options
    )
    return SortedRows(*rows, tiles_bound(P, E, tiles.m))


def gate_up(hidden: Tensor, experts: Experts, rows: SortedRows, act: Tensor, m: int, tile: TritonTile) -> None:
    """act[row] = silu(x Wg) * (x Wu) of every sorted row."""
    from ttnn_moe.gpu_kernels.triton import gate_up as kernel

    H, I = experts.H, experts.I
    gate, up, *steps = _halves(experts)
    routed = rows.offsets, rows.row_tokens, rows.tiles, rows.num_tiles
    constants = {"BLOCK_M": m, "EVEN_K": H % tile.k == 0, "PRECISION": precision(hidden)}
    kernel.gate_up[(rows.tiles_bound * ceil_div(I, tile.n),)](
        hidden, gate, up, *routed, act, H, I, *steps, **constants, **tile.options
    )


def project(
    hidden: Tensor, experts: Experts, which: str, rows: SortedRows, out: Tensor, m: int, tile: TritonTile
) -> None:
    """out[row] = x Wg (which="gate") or x Wu ("up") of every sorted row."""
    gate, up, *steps = _halves(experts)
    _grouped(hidden, gate if which == "gate" else up, steps, rows, out, m, tile, gather=True)


def down(act: Tensor, experts: Experts, rows: SortedRows, out: Tensor, m: int, tile: TritonTile) -> None:
    """out[row] = act[row] Wd of every sorted row."""
    _grouped(act, experts.tensors["down"], (experts.H, experts.I), rows, out, m, tile, gather=False)


def _grouped(
    x: Tensor,
    weights: Tensor,
    steps: Sequence[int],
    rows: SortedRows,
    out: Tensor,
    m: int,
    tile: TritonTile,
    gather: bool,
) -> None:
    """steps: rows of an expert in weights, and elements from one row to the next."""
    from ttnn_moe.gpu_kernels.triton.grouped_matmul import grouped_matmul

    M, N = x.shape[1], out.shape[1]
    routed = rows.offsets, rows.row_tokens, rows.tiles, rows.num_tiles
    constants = {"BLOCK_M": m, "GATHER": gather, "EVEN_K": M % tile.k == 0, "PRECISION": precision(x)}
    grouped_matmul[(rows.tiles_bound * ceil_div(N, tile.n),)](
        x, weights, *routed, out, M, N, *steps, **constants, **tile.options
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
    constants = {"K": K, "HAS_BOUND": num_tokens is not None, "ADD": accumulate, "BLOCK_H": block}
    kernel.combine[(T, ceil_div(H, block))](
        rows, inverse, weights, num_tokens, out, H, **constants, num_warps=max(1, min(8, block // 256))
    )


def few(call: Call, act: Tensor, tiles: FewTiles) -> None:
    """The whole operator of few pairs: act [T*K, I] is scratch."""
    from ttnn_moe.gpu_kernels.triton.few_down import few_down
    from ttnn_moe.gpu_kernels.triton.few_gate_up import few_gate_up

    routing, experts = call.routing, call.experts
    T, K, E_ids, H, I = routing.T, routing.K, routing.E, experts.H, experts.I
    gate, up, *steps = _halves(experts)
    route = routing.topk_ids, call.expert_map, routing.num_tokens
    given = {"HAS_MAP": call.expert_map is not None, "HAS_BOUND": routing.num_tokens is not None}
    few_gate_up[(ceil_div(I, tiles.gate_up.n), T * K)](
        call.hidden, gate, up, *route, act, E_ids, K, H, I, *steps, **given, **tiles.gate_up.options
    )
    tile = tiles.down
    few_down[(ceil_div(H, tile.n), T)](
        act,
        experts.tensors["down"],
        *route,
        routing.topk_weights,
        call.out,
        E_ids,
        H,
        I,
        K=K,
        ADD=call.accumulate,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        STAGES=tile.stages,
        num_warps=tile.warps,
        **given,
    )


def silu_mul(gate: Tensor, up: Tensor, out: Tensor) -> None:
    """out = silu(gate) * up."""
    from ttnn_moe.gpu_kernels.triton import silu_mul as kernel

    n = out.numel()
    if n:
        kernel.silu_mul[(ceil_div(n, 1024),)](gate, up, out, n, BLOCK=1024)


def _halves(experts: Experts) -> tuple[Tensor, Tensor, int, int]:
    """Gate rows and up rows of gate_up [E, 2I, H], as two views; rows of an expert, elements from row to row."""
    weight, H, I = experts.tensors["gate_up"], experts.H, experts.I
    if experts.gate_up_order == "interleaved":
        return weight, weight[:, 1:], I, 2 * H
    return weight, weight[:, I:], 2 * I, H
