"""Launching the CUDA C++ kernels: arguments, grids, shared memory. Inputs were checked before."""

from __future__ import annotations

from ctypes import c_int32 as _int
from typing import Any

import torch
from torch import Tensor

from ...contract import Experts
from ...jit import load
from ..launch import Selection
from .maps import maps_of
from .plan import Few, Plan, Sorted
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
    gate_up = experts.tensors["gate_up"]
    interleaved = experts.gate_up_order == "interleaved"
    up = gate_up.data_ptr() + (H if interleaved else I * H) * gate_up.element_size()
    first, second = uses
    _launch(
        hidden.device, first, (-(-I // (plan.warps * plan.channels)), P), 32 * plan.warps,
        hidden.data_ptr(), gate_up.data_ptr(), up, *_pointers(selection), act.data_ptr(),
        _int(P), _int(selection.E_ids), _int(K), _int(H), _int(I), _int(I if interleaved else 2 * I),
        _int(2 * H if interleaved else H),
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
    sort, mlp, combine = uses
    _launch(
        device, sort, (plan.sort_cluster,), plan.sort_threads,
        *_pointers(selection), row_tokens, inverse, tiles, num_tiles,
        _int(P), _int(selection.E_ids), _int(E), _int(selection.K), _int(plan.gemm.max_n),
        cluster=plan.sort_cluster,
    )  # fmt: skip
    maps = maps_of(experts)
    _launch(
        device, mlp, (load.multiprocessors(device.index),), 384,
        maps.gate_up, maps.down, hidden.data_ptr(), row_tokens, tiles, num_tiles, act.data_ptr(),
        expert_out.data_ptr(), _int(H), _int(I),
    )  # fmt: skip
    threads = min(256, -(-H // 256) * 32)
    _launch(
        device, combine, (-(-H // (8 * threads)), selection.T), threads,
        expert_out.data_ptr(), inverse, selection.weights.data_ptr(), _pointer(selection.num_tokens), out.data_ptr(),
        _int(H),
    )  # fmt: skip


def _launch(
    device: torch.device, use: Use, grid: tuple[int, ...], block: int, *arguments: Any, cluster: int = 1
) -> None:  # fmt: skip
    """On torch's current stream; every kernel waits by itself for what it needs of its predecessor."""
    from cuda.core import launch

    launch(
        load.stream(device.index),
        load.config(grid, block, use.shared_memory, cluster, overlap=True),
        load.kernel(use.spec, device.index, use.shared_memory),
        *arguments,
    )


def _pointers(selection: Selection) -> tuple[int, int, int]:
    return selection.ids.data_ptr(), _pointer(selection.expert_map), _pointer(selection.num_tokens)


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _tiles(P: int, E: int, plan: Sorted) -> int:
    """Tiles that any routing of P pairs to E experts can need."""
    return min(-(-P // plan.gemm.max_n) + min(E, P), P)


def _aligned(n: int) -> int:
    return -(-n // 4) * 4
