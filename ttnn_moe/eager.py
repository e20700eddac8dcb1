"""The operator and its steps on torch tensors: check once, choose a backend, call it."""

from __future__ import annotations

from torch import Tensor

from . import registry
from .backend import run
from .contract import (
    Experts,
    Problem,
    Routing,
    check,
    check_accumulate,
    check_down_projection,
    check_gate_and_up,
    check_hidden,
    check_memory,
)
from .memory import dense, note_write


def moe(
    hidden: Tensor, routing: Routing, experts: Experts, out: Tensor | None, accumulate: bool, backend: str
) -> Tensor:
    """As ttnn_moe.moe: out [T, H]. What the caller promises of ids is in the routing."""
    problem = check(hidden, routing, experts, out)
    check_accumulate(out, accumulate)
    chosen = registry.choose(problem, backend)
    hidden = dense(hidden)
    if out is None:
        # not isinstance: that takes microseconds of an eager call
        if (moe_new := getattr(chosen, "moe_new", None)) is not None:
            return run(moe_new, hidden, routing, experts)  # type: ignore[no-any-return]
        out = hidden.new_empty(routing.T, experts.H)
    else:
        check_memory(out, routing, hidden, *experts.tensors.values())
        note_write(out)
    run(chosen.moe, hidden, routing, experts, out, accumulate)
    return out


def step(name: str, hidden: Tensor, routing: Routing, experts: Experts, row_align: int, backend: str) -> Tensor:
    """As ttnn_moe.gate_projection, up_projection or gate_up, by name: [capacity, I]."""
    check_hidden(hidden, routing, experts)
    chosen = registry.choose(Problem.of(routing.T, routing.K, experts, hidden.dtype), backend)
    return run(getattr(chosen, name), dense(hidden), routing, experts, row_align)


def silu_mul(gate: Tensor, up: Tensor, backend: str) -> Tensor:
    """As ttnn_moe.silu_mul: [rows, I]."""
    check_gate_and_up(gate, up)
    rows, I = gate.shape
    problem = Problem(rows, 1, 1, max(I, 1), max(I, 1), gate.dtype, device=gate.device.type)
    return run(registry.choose(problem, backend).silu_mul, dense(gate), dense(up))


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
    problem = check_down_projection(activations, routing, experts, row_align, out, accumulate)
    chosen = registry.choose(problem, backend)
    activations = dense(activations)
    if out is None:
        out = activations.new_empty(routing.T, experts.H)
    else:
        check_memory(out, routing, activations, *experts.tensors.values())
        note_write(out)
    run(chosen.down_projection, activations, routing, experts, row_align, out, accumulate)
    return out
