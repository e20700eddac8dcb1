"""Launching the CUDA C++ kernels: arguments, grids, shared memory. Inputs were checked before."""

from __future__ import annotations

from ctypes import c_int32 as _int
from functools import lru_cache

from torch import Tensor, float16, float32, int64

from ...contract import Experts
from ..device import gpu
from ..jit import load
from ..jit.load import Launch
from ..launch import Selection
from ..maps import maps_of
from . import sm80_tiles
from .plan import Few, Gemm, Plan, Sorted
from .specs import Types, Use, uses_of


def run(
    hidden: Tensor,
    selection: Selection,
    experts: Experts,
    out: Tensor,
    accumulate: bool,
    plan: Plan,
    act: Tensor,
    expert_out: Tensor | None,
    words: Tensor | None,
) -> None:
    """The whole operator on the current GPU.

    Args:
        act: [T*K or more, I] scratch.
        expert_out, words: [T*K or more, H], and sort_words int32 or more: scratch of the sorted form.
    """
    ids, order = selection.ids, experts.gate_up_order
    T, K = ids.shape
    types = Types(hidden.dtype == float16, ids.dtype == int64, out.dtype == float32, accumulate)
    launches = _launches(
        plan, types, T, K, selection.E_ids, experts.E, experts.H, experts.I, order, hidden.device.index
    )
    if isinstance(plan, Few):
        _few(hidden, selection, experts, out, launches, act)
    else:
        assert expert_out is not None and words is not None
        _sorted(hidden, selection, experts, out, plan, launches, act, expert_out, words)


def sort_words(P: int, E: int, plan: Sorted) -> int:
    """int32 words that the sort of P pairs writes."""
    return 2 * _aligned(P) + 4 * _tiles(P, E, plan) + 4


@lru_cache(maxsize=4096)
def _launches(
    plan: Plan, types: Types, T: int, K: int, E_ids: int, E: int, H: int, I: int, order: str, device: int
) -> tuple[Launch, ...]:
    """Of one call, in their order, with everything but addresses: Python takes longer to work it out than to launch."""
    P, interleaved = T * K, order == "interleaved"
    # rows of an expert, and elements from one row to the next
    row = (I, 2 * H) if interleaved else (2 * I, H)

    def bind(use: Use, grid: tuple[int, ...], block: int, *last: int, cluster: int = 1) -> Launch:
        ints = map(_int, last)
        return Launch(
            use.spec, device, grid, block, *ints, shared_memory=use.shared_memory, cluster=cluster, overlap=use.overlap
        )

    uses = uses_of(plan, E, K, types)
    if isinstance(plan, Few):
        gate_up, down = uses
        return (
            bind(gate_up, (-(-I // (plan.warps * plan.channels)), P), 32 * plan.warps, P, E_ids, K, H, I, *row),
            bind(down, (-(-H // plan.columns), T), 32 * K, P, E_ids, H, I),
        )
    sort, *products, combine = uses
    threads = min(256, -(-H // 256) * 32)
    if isinstance(plan.gemm, Gemm):
        bound = [bind(products[0], (gpu(device).multiprocessors,), 384, H, I)]
    else:
        sizes = ((H, I, *row), (I, H, H, I))
        bound = [
            bind(use, (_resident(use, device),), sm80_tiles.THREADS, *last)
            for use, last in zip(products, sizes, strict=True)
        ]
    return (
        bind(sort, (plan.sort_cluster,), plan.sort_threads, P, E_ids, E, K, plan.gemm.max_n, cluster=plan.sort_cluster),
        *bound,
        bind(combine, (T, -(-H // (8 * threads))), threads, H),
    )


def _few(
    hidden: Tensor, selection: Selection, experts: Experts, out: Tensor, launches: tuple[Launch, ...], act: Tensor
) -> None:
    gate_up, down = launches
    stream, route, between = load.stream(hidden.device.index), _pointers(selection), act.data_ptr()
    gate_up(stream, hidden.data_ptr(), *_halves(experts), *route, between)
    down(stream, between, experts.tensors["down"].data_ptr(), *route, selection.weights.data_ptr(), out.data_ptr())


def _sorted(
    hidden: Tensor,
    selection: Selection,
    experts: Experts,
    out: Tensor,
    plan: Sorted,
    launches: tuple[Launch, ...],
    act: Tensor,
    expert_out: Tensor,
    words: Tensor,
) -> None:
    P, E, stream = selection.ids.numel(), experts.E, load.stream(hidden.device.index)
    row_tokens = words.data_ptr()
    inverse = row_tokens + 4 * _aligned(P)
    tiles = inverse + 4 * _aligned(P)
    num_tiles = tiles + 16 * _tiles(P, E, plan)
    routed, between, rows = (row_tokens, tiles, num_tiles), act.data_ptr(), expert_out.data_ptr()
    sort, *products, combine = launches
    sort(stream, *_pointers(selection), row_tokens, inverse, tiles, num_tiles)
    if isinstance(plan.gemm, Gemm):
        maps = maps_of(experts)
        products[0](stream, maps.gate_up, maps.down, hidden.data_ptr(), *routed, between, rows)
    else:
        down = experts.tensors["down"].data_ptr()
        products[0](stream, *_halves(experts), hidden.data_ptr(), *routed, between)
        products[1](stream, down, down, between, *routed, rows)
    combine(stream, rows, inverse, selection.weights.data_ptr(), _pointer(selection.num_tokens), out.data_ptr())


def _pointers(selection: Selection) -> tuple[int, int, int]:
    return selection.ids.data_ptr(), _pointer(selection.expert_map), _pointer(selection.num_tokens)


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _halves(experts: Experts) -> tuple[int, int]:
    """Where gate and up rows begin."""
    weight = experts.tensors["gate_up"]
    first, rows = weight.data_ptr(), 1 if experts.gate_up_order == "interleaved" else experts.I
    return first, first + rows * experts.H * weight.element_size()


def _resident(use: Use, device: int) -> int:
    """Blocks of sm80/grouped_gemm.cu that run at one time."""
    return load.resident_blocks(use.spec, device, sm80_tiles.THREADS, use.shared_memory)


def _tiles(P: int, E: int, plan: Sorted) -> int:
    """Tiles that any routing of P pairs to E experts can need."""
    return min(-(-P // plan.gemm.max_n) + min(E, P), P)


def _aligned(n: int) -> int:
    return -(-n // 4) * 4
