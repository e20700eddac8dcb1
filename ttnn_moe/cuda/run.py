"""One call on the GPU: the plan of its sizes, its buffers, its launches.

The CUDA C++ kernels of native/ run where they serve; else the Triton kernels.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from ..contract import Experts, Routing
from ..logs import logger
from . import arch as native_arch
from . import launch, tiles
from .device import gpu
from .native import plan as native
from .tiles import FEW_PAIRS, Few, Sorted

Plan = tiles.Plan | native.Plan


@lru_cache(maxsize=4096)
def plan_of(T: int, E: int, K: int, H: int, I: int, itemsize: int, device: torch.device) -> Plan:
    """Kernels and tiles of a call with T tokens, or a bound on them, and ids of E experts."""
    plan, why = plan_and_why(T, E, K, H, I, itemsize, device)
    logger.debug("T={} E={} K={} H={} I={}: {}", T, E, K, H, I, why)
    return plan


def plan_and_why(T: int, E: int, K: int, H: int, I: int, itemsize: int, device: torch.device) -> tuple[Plan, str]:
    """As plan_of; and which kernels these are, and why no others, in words.

    Raises:
        ContractError: TTNN_MOE_CUDA_ARCH names what the GPU does not run.
    """
    here = gpu(device)
    of = here.capability
    triton = tiles.choose(T, E, K, H, I, itemsize, of)
    if device.type != "cuda":
        return triton, "Triton kernels, interpreted"
    arch = native_arch.find(here, native_arch.asked())
    if arch is None:
        reason: str | None = f"they are for compute capability 8.x, 9.0 and 12.x, not {of[0]}.{of[1]}"
    else:
        reason = native.why_not(T, E, K, H, I, itemsize, arch) or no_compiler()
        if reason is None:
            return native.choose(T, E, K, arch), f"CUDA C++ kernels for {arch.name}"
    return triton, f"Triton kernels, since the CUDA C++ kernels do not serve: {reason}"


@cache
def no_compiler() -> str | None:
    """Why CUDA C++ cannot be compiled here, or None."""
    from .jit.build import why_not

    return why_not()


def triton_plan(T: int, E: int, K: int, experts: Experts) -> tiles.Plan:
    """As plan_of, of the Triton kernels alone."""
    down = experts.tensors["down"]
    return tiles.choose(T, E, K, experts.H, experts.I, down.element_size(), gpu(down.device).capability)


def plan_for(T: int, E: int, K: int, experts: Experts, *others: Tensor) -> Plan:
    """plan_of, for these weights and tensors: CUDA C++ kernels want them to begin at multiples of 16 bytes."""
    gate_up, down = experts.tensors["gate_up"], experts.tensors["down"]
    plan = plan_of(T, E, K, experts.H, experts.I, down.element_size(), down.device)
    if isinstance(plan, native.Few | native.Sorted) and any(
        tensor.data_ptr() % 16 for tensor in (gate_up, down, *others)
    ):
        logger.debug("T={}: Triton kernels, since a tensor begins at no multiple of 16 bytes", T)
        return triton_plan(T, E, K, experts)
    return plan


def on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current one: Triton launches on that, wherever the tensors are."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


@dataclass(frozen=True)
class Buffers:
    """Scratch of one call: activations [pairs, I]; on the sorted path expert outputs [pairs, H], int32 words."""

    act: Tensor
    expert_out: Tensor | None
    words: Tensor | None

    @classmethod
    def of(cls, plan: Plan, pairs: int, experts: Experts) -> Buffers:
        down = experts.tensors["down"]
        act = down.new_empty(pairs, experts.I)
        if isinstance(plan, Few | native.Few):
            return cls(act, None, None)
        words = torch.empty(words_of(plan, pairs, experts.E), dtype=torch.int32, device=down.device)
        return cls(act, down.new_empty(pairs, experts.H), words)


def words_of(plan: Plan, pairs: int, E: int) -> int:
    """int32 words that sorting takes."""
    if isinstance(plan, native.Sorted):
        from .native.launch import sort_words

        return sort_words(pairs, E, plan)
    return launch.sort_words(pairs, E, plan) if isinstance(plan, Sorted) else 0


def most_words(T: int, E: int, K: int) -> int:
    """int32 words that suffice for any plan of up to T tokens."""
    pairs, padded = T * K, 2 * max(E, 16)
    return 2 * pairs + 4 * (pairs // 16 + min(E, pairs)) + (pairs // 2048 + 1) * padded + 2 * E + 64


def run(
    hidden: Tensor,
    selection: launch.Selection,
    experts: Experts,
    out: Tensor,
    accumulate: bool,
    plan: Plan,
    buffers: Buffers,
) -> None:
    """Write, or add, the operator's result to out [T, H]; T > 0."""
    with on(hidden.device):
        _run(hidden, selection, experts, out, accumulate, plan, buffers)


def _run(
    hidden: Tensor,
    selection: launch.Selection,
    experts: Experts,
    out: Tensor,
    accumulate: bool,
    plan: Plan,
    buffers: Buffers,
) -> None:
    if isinstance(plan, native.Few | native.Sorted):
        from .native.launch import run as run_native

        run_native(hidden, selection, experts, out, accumulate, plan, buffers.act, buffers.expert_out, buffers.words)
        return
    pairs = selection.ids.numel()
    act = buffers.act[:pairs]
    if isinstance(plan, Few):
        launch.few(hidden, experts, selection, act, out, accumulate, plan)
        return
    assert buffers.expert_out is not None
    expert_out = buffers.expert_out[:pairs]
    rows = launch.sort(selection, experts.E, plan, buffers.words)
    launch.gate_up(hidden, experts, rows, act, plan.m, plan.gate_up)
    launch.down(act, experts, rows, expert_out, plan.m, plan.down)
    launch.combine(expert_out, rows.inverse, selection.weights, selection.num_tokens, out, accumulate, plan.combine_h)


def step_plan(routing: Routing, experts: Experts) -> Sorted:
    """The plan of the step operators, which are always sorted: for few tokens that of a few more."""
    plan = triton_plan(routing.T, routing.E, routing.K, experts)
    if isinstance(plan, Few):
        plan = triton_plan(routing.T + FEW_PAIRS, routing.E, routing.K, experts)
    assert isinstance(plan, Sorted)
    return plan


def step_rows(routing: Routing, row_align: int, m: int) -> launch.SortedRows:
    """The rows of the step tensors in tiles of m."""
    layout = routing.step_layout(row_align)
    start = layout.row_start
    bound = launch.tiles_bound(layout.capacity, routing.E, m)
    tiles_of = (start.diff() + m - 1) // m
    last = tiles_of.cumsum(0)
    tile = torch.arange(bound, device=start.device)
    # past the last tile: any expert, never read
    expert = torch.searchsorted(last, tile, right=True).clamp_max(routing.E - 1)
    first = start[expert] + (tile - (last - tiles_of)[expert]) * m
    begin = torch.stack([expert, first], 1).int()
    return launch.SortedRows(start, layout.row_tokens, layout.inverse, begin, last[-1:].int(), bound)
