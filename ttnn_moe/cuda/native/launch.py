"""Launching the CUDA C++ kernels: arguments, grids, shared memory. Inputs were checked before."""

from __future__ import annotations

from ctypes import c_int32 as _int
from typing import Any

import torch
from torch import Tensor

from ...contract import Experts
from ...jit import load
from ..launch import Selection
from . import sm80_tiles
from .maps import maps_of
from .plan import Few, Gemm, Plan, Sorted
from .specs import Types, Use, uses_of


def run(
    hidden: Tensor, selection: Selection, experts: Experts, out: Tensor, accumulate: bool, plan: Plan, act: Tensor,
    expert_out: Tensor | None, words: Tensor | None,
) -> None:  # fmt: skip
    """The whole operator on the current GPU.

    Args:
        act: [T*K, I] scratch.
        expert_out, words: [T*K, H], and sort_words int32: scratch of the sorted form.
    """
    types = Types(
        hidden.dtype == torch.float16,
        selection.ids.dtype == torch.int64,
        out.dtype == torch.float32,
        accumulate,
    )
    uses = uses_of(plan, experts.E, selection.K, types)
    if isinstance(plan, Few):
        _few(hidden, selection, experts, out, plan, uses, act)
    else:
        assert expert_out is not None and words is not None
        _sorted(hidden, selection, experts, out, plan, uses, act, expert_out, words)


def sort_words(P: int, E: int, plan: Sorted) -> int:
    """int32 words that the sort of P pairs writes."""
    return 2 * _aligned(P) + 4 * _tiles(P, E, plan) + 4


def _few(
    hidden: Tensor, selection: Selection, experts: Experts, out: Tensor, plan: Few, uses: tuple[Use, ...], act: Tensor
) -> None:  # fmt: skip
    T, K, H, I, P = selection.T, selection.K, experts.H, experts.I, selection.ids.numel()
    gate_up, row = _halves(experts)
    first, second = uses
    _launch(
        hidden.device, first, (-(-I // (plan.warps * plan.channels)), P), 32 * plan.warps,
        hidden.data_ptr(), *gate_up, *_pointers(selection), act.data_ptr(),
        _int(P), _int(selection.E_ids), _int(K), _int(H), _int(I), *row,
    )  # fmt: skip
    _launch(
        hidden.device, second, (-(-H // plan.columns), T), 32 * K,
        act.data_ptr(), experts.tensors["down"].data_ptr(), *_pointers(selection), selection.weights.data_ptr(),
        out.data_ptr(), _int(P), _int(selection.E_ids), _int(H), _int(I),
    )  # fmt: skip


def _sorted(
    hidden: Tensor, selection: Selection, experts: Experts, out: Tensor, plan: Sorted, uses: tuple[Use, ...],
    act: Tensor, expert_out: Tensor, words: Tensor,
) -> None:  # fmt: skip
    device, P, E, H, I = hidden.device, selection.ids.numel(), experts.E, experts.H, experts.I
    row_tokens = words.data_ptr()
    inverse = row_tokens + 4 * _aligned(P)
    tiles = inverse + 4 * _aligned(P)
    num_tiles = tiles + 16 * _tiles(P, E, plan)
    sort, *products, combine = uses
    _launch(
        device, sort, (plan.sort_cluster,), plan.sort_threads,
        *_pointers(selection), row_tokens, inverse, tiles, num_tiles,
        _int(P), _int(selection.E_ids), _int(E), _int(selection.K), _int(plan.gemm.max_n),
        cluster=plan.sort_cluster,
    )  # fmt: skip
    routed = (row_tokens, tiles, num_tiles)
    if isinstance(plan.gemm, Gemm):
        maps = maps_of(experts)
        _launch(
            device, products[0], (load.multiprocessors(device.index),), 384,
            maps.gate_up, maps.down, hidden.data_ptr(), *routed, act.data_ptr(), expert_out.data_ptr(),
            _int(H), _int(I),
        )  # fmt: skip
    else:
        gate_up, down = products
        (gate, up), row = _halves(experts)
        _launch(
            device, gate_up, (_resident(device, gate_up),), sm80_tiles.THREADS,
            gate, up, hidden.data_ptr(), *routed, act.data_ptr(), _int(H), _int(I), *row,
        )  # fmt: skip
        weights = experts.tensors["down"].data_ptr()
        _launch(
            device, down, (_resident(device, down),), sm80_tiles.THREADS,
            weights, weights, act.data_ptr(), *routed, expert_out.data_ptr(), _int(I), _int(H), _int(H), _int(I),
        )  # fmt: skip
    threads = min(256, -(-H // 256) * 32)
    _launch(
        device, combine, (selection.T, -(-H // (8 * threads))), threads,
        expert_out.data_ptr(), inverse, selection.weights.data_ptr(), _pointer(selection.num_tokens), out.data_ptr(),
        _int(H),
    )  # fmt: skip


def _launch(
    device: torch.device, use: Use, grid: tuple[int, ...], block: int, *arguments: Any, cluster: int = 1
) -> None:  # fmt: skip
    load.launch(
        use.spec, device.index, grid, block, *arguments,
        shared_memory=use.shared_memory, cluster=cluster, overlap=use.overlap,
    )  # fmt: skip


def _pointers(selection: Selection) -> tuple[int, int, int]:
    return selection.ids.data_ptr(), _pointer(selection.expert_map), _pointer(selection.num_tokens)


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _halves(experts: Experts) -> tuple[tuple[int, int], tuple[Any, Any]]:
    """Where gate and up rows begin; rows of an expert, and elements from one row to the next."""
    weight, H, I = experts.tensors["gate_up"], experts.H, experts.I
    first = weight.data_ptr()
    if experts.gate_up_order == "interleaved":
        return (first, first + H * weight.element_size()), (_int(I), _int(2 * H))
    return (first, first + I * H * weight.element_size()), (_int(2 * I), _int(H))


def _resident(device: torch.device, use: Use) -> int:
    """Blocks of sm80/grouped_gemm.cu that run at one time."""
    return load.resident_blocks(use.spec, device.index, sm80_tiles.THREADS, use.shared_memory)


def _tiles(P: int, E: int, plan: Sorted) -> int:
    """Tiles that any routing of P pairs to E experts can need."""
    return min(-(-P // plan.gemm.max_n) + min(E, P), P)


def _aligned(n: int) -> int:
    return -(-n // 4) * 4
