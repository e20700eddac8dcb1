"""Launching the CUDA C++ kernels: arguments, grids, shared memory. Inputs were checked before."""

from __future__ import annotations

from ctypes import c_int32 as _int

import torch
from cuda.core import launch
from torch import Tensor

from ...contract import Experts
from ...jit import load
from ...jit.spec import Spec
from ..launch import Selection
from .maps import maps_of
from .plan import Few, Gemm, Plan, Sorted

ARCH = "sm_90a"


def run(
    hidden: Tensor, selection: Selection, experts: Experts, out: Tensor, accumulate: bool, plan: Plan, act: Tensor,
    expert_out: Tensor | None,
) -> None:  # fmt: skip
    """The whole operator on the current GPU; act [T*K, I] and, on the sorted path, expert_out [T*K, H] are scratch."""
    if isinstance(plan, Few):
        _few(hidden, selection, experts, out, accumulate, plan, act)
        return
    assert expert_out is not None
    inverse, tiles = _sorted(hidden, selection, experts, plan, act, expert_out)
    _combine(expert_out, inverse, selection, out, accumulate)


def _few(
    hidden: Tensor, selection: Selection, experts: Experts, out: Tensor, accumulate: bool, plan: Few, act: Tensor
) -> None:  # fmt: skip
    device = hidden.device.index
    T, K, H, I, P = selection.T, selection.K, experts.H, experts.I, selection.ids.numel()
    types = {"FP16": hidden.dtype == torch.float16, "ID64": selection.ids.dtype == torch.int64}
    gate_up = experts.tensors["gate_up"]
    interleaved = experts.gate_up_order == "interleaved"
    up = gate_up.data_ptr() + (H if interleaved else I * H) * gate_up.element_size()
    routing = (selection.ids.data_ptr(), _pointer(selection.expert_map), _pointer(selection.num_tokens))
    where = load.stream(device)

    first = Spec.of("common/few_gate_up", ARCH, **types, WARPS=plan.warps, CHANNELS=plan.channels, UNROLL=plan.unroll)
    grid = (-(-I // (plan.warps * plan.channels)), P)
    launch(
        where, load.config(grid, 32 * plan.warps, overlap=True), load.kernel(first, device),
        hidden.data_ptr(), gate_up.data_ptr(), up, *routing, act.data_ptr(),
        _int(P), _int(selection.E_ids), _int(K), _int(H), _int(I), _int(I if interleaved else 2 * I),
        _int(2 * H if interleaved else H),
    )  # fmt: skip
    second = Spec.of(
        "common/few_down", ARCH, **types, TOP_K=K, COLUMNS=plan.columns, PREFETCH=plan.prefetch,
        OUT32=out.dtype == torch.float32, ADD=accumulate,
    )  # fmt: skip
    launch(
        where, load.config((-(-H // plan.columns), T), 32 * K, overlap=True), load.kernel(second, device),
        act.data_ptr(), experts.tensors["down"].data_ptr(), *routing, selection.weights.data_ptr(), out.data_ptr(),
        _int(P), _int(selection.E_ids), _int(H), _int(I),
    )  # fmt: skip


def _sorted(
    hidden: Tensor, selection: Selection, experts: Experts, plan: Sorted, act: Tensor, expert_out: Tensor
) -> tuple[int, Tensor]:  # fmt: skip
    """Launch sort, gate/up and down; the address of the inverse map, and the tensor that holds it."""
    device, P, E, gemm = hidden.device.index, selection.ids.numel(), experts.E, plan.gemm
    half = hidden.dtype == torch.float16
    where = load.stream(device)
    bound = min(-(-P // gemm.tile_rows) + min(E, P), P)
    pairs = -(-P // 4) * 4
    words = torch.empty(2 * pairs + 4 * bound + 4, dtype=torch.int32, device=hidden.device)
    row_tokens = words.data_ptr()
    inverse, tiles, num_tiles = row_tokens + 4 * pairs, row_tokens + 8 * pairs, row_tokens + 8 * pairs + 16 * bound

    sort = Spec.of(
        "common/routing_sort", ARCH, ID64=selection.ids.dtype == torch.int64, CLUSTER=plan.sort_cluster,
        THREADS=plan.sort_threads,
    )  # fmt: skip
    memory = (plan.sort_threads // 32 + 5) * E * 4
    launch(
        where, load.config((plan.sort_cluster,), plan.sort_threads, memory, plan.sort_cluster, overlap=True),
        load.kernel(sort, device, memory),
        selection.ids.data_ptr(), _pointer(selection.expert_map), _pointer(selection.num_tokens),
        row_tokens, inverse, tiles, num_tiles,
        _int(P), _int(selection.E_ids), _int(E), _int(selection.K), _int(gemm.tile_rows), _int(plan.by_size),
    )  # fmt: skip

    maps = maps_of(experts)
    sizes = {"FP16": half, "CLUSTER": gemm.cluster, "MAX_N": gemm.max_n, "STAGES": gemm.stages}
    memory = gemm.shared_memory
    settings = load.config((_blocks(device, gemm),), 384, memory, gemm.cluster, overlap=True)
    routed = (row_tokens, tiles, num_tiles)
    launch(
        where, settings, load.kernel(Spec.of("sm90/grouped_gemm", ARCH, GATE_UP=True, **sizes), device, memory),
        maps.gate_up, hidden.data_ptr(), *routed, act.data_ptr(), _int(experts.H), _int(experts.I),
    )  # fmt: skip
    launch(
        where, settings, load.kernel(Spec.of("sm90/grouped_gemm", ARCH, GATE_UP=False, **sizes), device, memory),
        maps.down, act.data_ptr(), *routed, expert_out.data_ptr(), _int(experts.I), _int(experts.H),
    )  # fmt: skip
    return inverse, words


def _combine(expert_out: Tensor, inverse: int, selection: Selection, out: Tensor, accumulate: bool) -> None:
    device, H = out.device.index, out.shape[1]
    threads = min(256, -(-H // 256) * 32)
    spec = Spec.of(
        "common/combine", ARCH, FP16=expert_out.dtype == torch.float16, TOP_K=selection.K,
        OUT32=out.dtype == torch.float32, ADD=accumulate,
    )  # fmt: skip
    launch(
        load.stream(device), load.config((-(-H // (8 * threads)), selection.T), threads, overlap=True),
        load.kernel(spec, device),
        expert_out.data_ptr(), inverse, selection.weights.data_ptr(), _pointer(selection.num_tokens), out.data_ptr(),
        _int(H),
    )  # fmt: skip


def _blocks(device: int, gemm: Gemm) -> int:
    return load.multiprocessors(device) // gemm.cluster * gemm.cluster


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
