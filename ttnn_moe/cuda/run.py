"""One call on the GPU: the plan of its sizes, its buffers, its launches."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ..contract import Experts, Routing
from . import launch
from .tiles import FEW_PAIRS, Few, Plan, Sorted, choose


def plan_of(T: int, E: int, K: int, experts: Experts) -> Plan:
    """Kernels and tiles of a call with T tokens, or a bound on them, and ids of E experts."""
    down = experts.tensors["down"]
    return choose(T, E, K, experts.H, experts.I, down.element_size(), capability(down.device))


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU; Triton's interpreter, on the CPU, stands for Hopper."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current one: Triton launches on that, wherever the tensors are."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


@dataclass(frozen=True)
class Buffers:
    """Scratch of one call: activations [pairs, I] and, on the sorted path, expert outputs [pairs, H]."""

    act: Tensor
    expert_out: Tensor | None

    @classmethod
    def of(cls, plan: Plan, pairs: int, experts: Experts) -> Buffers:
        down = experts.tensors["down"]
        expert_out = None if isinstance(plan, Few) else down.new_empty(pairs, experts.H)
        return cls(down.new_empty(pairs, experts.I), expert_out)


def run(
    hidden: Tensor, selection: launch.Selection, experts: Experts, out: Tensor, accumulate: bool, plan: Plan,
    buffers: Buffers,
) -> None:  # fmt: skip
    """Write, or add, the operator's result to out [T, H]; T > 0."""
    with on(hidden.device):
        _run(hidden, selection, experts, out, accumulate, plan, buffers)


def _run(
    hidden: Tensor, selection: launch.Selection, experts: Experts, out: Tensor, accumulate: bool, plan: Plan,
    buffers: Buffers,
) -> None:  # fmt: skip
    pairs = selection.ids.numel()
    act = buffers.act[:pairs]
    if isinstance(plan, Few):
        launch.few(hidden, experts, selection, act, out, accumulate, plan)
        return
    assert buffers.expert_out is not None
    expert_out = buffers.expert_out[:pairs]
    rows = launch.sort(selection, experts.E, plan)
    launch.gate_up(hidden, experts, rows, act, plan.m, plan.gate_up)
    launch.down(act, experts, rows, expert_out, plan.m, plan.down)
    launch.combine(expert_out, rows.inverse, selection.weights, selection.num_tokens, out, accumulate, plan.combine_h)


def step_plan(routing: Routing, experts: Experts) -> Sorted:
    """The plan of the step operators, which are always sorted: for few tokens that of a few more."""
    plan = plan_of(routing.T, routing.E, routing.K, experts)
    if isinstance(plan, Few):
        plan = plan_of(routing.T + FEW_PAIRS, routing.E, routing.K, experts)
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
    tiles = torch.stack([expert, first], 1).int()
    return launch.SortedRows(start, layout.row_tokens, layout.inverse, tiles, last[-1:].int(), bound)
