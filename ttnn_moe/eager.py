"""The operator and its steps on torch tensors: check once, choose a backend, call it."""

from __future__ import annotations

import torch
from torch import Tensor

from . import registry
from .contract import (
    Experts,
    Problem,
    Routing,
    check,
    check_accumulate,
    check_gate_and_up,
    check_hidden,
    check_out,
    check_rows,
    step_capacity,
)


def moe(
    hidden: Tensor, routing: Routing, experts: Experts, out: Tensor | None, accumulate: bool, backend: str
) -> Tensor:
    """As ttnn_moe.moe: out [T, H]."""
    problem = check(hidden, routing, experts, out)
    check_accumulate(out, accumulate)
    chosen = registry.choose(problem, backend)
    if out is None:
        out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    chosen.moe(hidden.contiguous(), routing, experts, out, accumulate)
    return out


def step(name: str, hidden: Tensor, routing: Routing, experts: Experts, row_align: int, backend: str) -> Tensor:
    """As ttnn_moe.gate_projection, up_projection or gate_up, by name: [capacity, I]."""
    check_hidden(hidden, routing, experts)
    chosen = registry.choose(Problem.of(routing.T, routing.K, experts, hidden.dtype), backend)
    return getattr(chosen, name)(hidden.contiguous(), routing, experts, row_align)


def silu_mul(gate: Tensor, up: Tensor, backend: str) -> Tensor:
    """As ttnn_moe.silu_mul: [rows, I]."""
    check_gate_and_up(gate, up)
    rows, I = gate.shape
    problem = Problem(rows, 1, 1, max(I, 1), max(I, 1), gate.dtype, device=gate.device.type)
    return registry.choose(problem, backend).silu_mul(gate, up)


def down_projection(
    activations: Tensor,
    routing: Routing,
    experts: Experts,
    row_align: int,
    out: Tensor | None,
    accumulate: bool,
    backend: str,
) -> Tensor:
    """As ttnn_moe.down_projection: out [T, H]."""
    out = out_of_down_projection(activations, routing, experts, row_align, out, accumulate)
    problem = Problem.of(routing.T, routing.K, experts, activations.dtype, out.dtype)
    chosen = registry.choose(problem, backend)
    chosen.down_projection(activations.contiguous(), routing, experts, row_align, out, accumulate)
    return out


def out_of_down_projection(
    activations: Tensor, routing: Routing, experts: Experts, row_align: int, out: Tensor | None, accumulate: bool
) -> Tensor:
    """Check a down projection's arguments; returns out, made where it is absent."""
    capacity = step_capacity(routing.T, routing.K, routing.E, row_align)
    check_rows("activations", activations, capacity, experts.I, experts.dtype or activations.dtype)
    check_accumulate(out, accumulate)
    if out is None:
        out = activations.new_empty(routing.T, experts.H)
    check_out(out, activations.new_empty(routing.T, 0), experts.H)
    return out
