"""The operator and its steps: check once, choose a backend, call it.

Inference only: under autograd the result is computed, and a backward pass through it raises.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import registry
from .backend import Prepared
from .contract import (
    Experts,
    Placement,
    Problem,
    Routing,
    check,
    check_accumulate,
    check_hidden,
    check_out,
    check_rows,
    step_capacity,
)
from .errors import ContractError


def moe(
    hidden: Tensor,
    routing: Routing,
    experts: Experts,
    *,
    out: Tensor | None = None,
    accumulate: bool = False,
    backend: str = "auto",
) -> Tensor:
    """One Mixture-of-Experts layer: route, gate and up, SiLU*mul, down, weigh, sum.

    With ttnn tensors, routing and experts are those of ttnn_moe.tenstorrent, and nothing leaves the device.

    Args:
        hidden: [T, H] bf16, fp16 or fp32; a non-contiguous one is copied.
        routing: Routing.from_topk(topk_ids [T, K], topk_weights [T, K], E).
        experts: Experts.dense(gate_up [E, 2I, H], down [E, H, I]), or another format.
        out: [T, H] in the dtype of hidden or fp32, to write to; allocated when absent.
        accumulate: add to out instead of overwriting it.
        backend: a name in registry.backends(), or "auto".

    Returns:
        out [T, H].

    Raises:
        ContractError: inputs that break the contract. BackendUnavailable: nothing can run it.
    """
    if not isinstance(hidden, Tensor):
        return _on_device(hidden, routing, experts, out, accumulate, backend)
    problem = check(hidden, routing, experts, out)
    check_accumulate(out, accumulate)
    if _through_torch_op(hidden, routing.topk_weights, *experts.tensors.values()):
        from . import torch_ops

        return torch_ops.moe(hidden, routing, experts, out, accumulate, backend)
    chosen = registry.choose(problem, backend)
    if out is None:
        out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    chosen.moe(hidden.contiguous(), routing, experts, out, accumulate)
    return out


def prepare(problem: Problem, experts: Experts, placement: Placement | None = None, backend: str = "auto") -> Prepared:
    """Make one layer ready for calls of up to problem.T tokens: op(hidden, topk_ids, topk_weights) -> out.

    It owns workspace, compiled kernels and peer buffers; a call allocates nothing but its output. ids in calls are
    global expert ids. With a placement of D > 1 devices, experts are those of all devices when placement.rank is
    None (one process drives the mesh), else the E/D of that rank, and the result is that rank's partial sum.

    Raises:
        ContractError: experts, problem and placement do not fit. BackendUnavailable: nothing can run it.
    """
    full = described(problem, experts, placement)
    return registry.choose(full, backend).prepare(full, experts, placement)


def described(problem: Problem, experts: Experts, placement: Placement | None) -> Problem:
    """The problem with what experts and placement say of it: format, device, D.

    Raises:
        ContractError: they do not fit.
    """
    D, E_held = 1, problem.E
    if placement is not None:
        D = placement.D
        E_held = placement.E_local if placement.rank is not None else placement.E
        if placement.E != problem.E:
            raise ContractError("placement is for another number of experts", got=placement.E, expected=problem.E)
    if (experts.E, experts.H, experts.I) != (E_held, problem.H, problem.I):
        raise ContractError(
            "experts do not fit the problem",
            got=f"E={experts.E}, H={experts.H}, I={experts.I}",
            expected=f"E={E_held}, H={problem.H}, I={problem.I}",
        )
    if experts.dtype not in (None, problem.dtype):
        raise ContractError("experts have another dtype", got=experts.dtype, expected=problem.dtype)
    held = Problem.of(problem.T, problem.K, experts, problem.dtype, problem.out_dtype)
    return replace(held, E=problem.E, D=D)


def gate_projection(
    hidden: Tensor, routing: Routing, experts: Experts, *, row_align: int = 1, backend: str = "auto"
) -> Tensor:
    """Step 1 of seed 004: each expert's tokens through its gate weights.

    Returns:
        [capacity, I] in the dtype of hidden; rows as routing.step_layout(row_align) says, others undefined.
    """
    return _step("gate_projection", hidden, routing, experts, row_align, backend)


def up_projection(
    hidden: Tensor, routing: Routing, experts: Experts, *, row_align: int = 1, backend: str = "auto"
) -> Tensor:
    """Step 2 of seed 004: each expert's tokens through its up weights; as gate_projection."""
    return _step("up_projection", hidden, routing, experts, row_align, backend)


def gate_up(hidden: Tensor, routing: Routing, experts: Experts, *, row_align: int = 1, backend: str = "auto") -> Tensor:
    """Steps 1 to 3 in one pass: activations silu(x Wg) * (x Wu), [capacity, I], rounded once where the backend can."""
    return _step("gate_up", hidden, routing, experts, row_align, backend)


def silu_mul(gate: Tensor, up: Tensor, *, backend: str = "auto") -> Tensor:
    """Step 3 of seed 004: silu(gate) * up in fp32, rounded once to their dtype. Both [rows, I]."""
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.device != up.device or gate.dim() != 2:
        raise ContractError(
            "gate and up do not fit together",
            got=f"{tuple(gate.shape)} {gate.dtype} and {tuple(up.shape)} {up.dtype}",
            expected="both [rows, I], one dtype, one device",
        )
    if _through_torch_op(gate, up):
        from . import torch_ops

        return torch_ops.silu_mul(gate, up, backend)
    rows, I = gate.shape
    problem = Problem(rows, 1, 1, max(I, 1), max(I, 1), gate.dtype, device=gate.device.type)
    return registry.choose(problem, backend).silu_mul(gate, up)


def down_projection(
    activations: Tensor,
    routing: Routing,
    experts: Experts,
    *,
    row_align: int = 1,
    out: Tensor | None = None,
    accumulate: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Step 4 of seed 004: activations through the down weights, times the routing weights, summed per token.

    Args:
        activations: [capacity, I] as gate_up returns them, for the same routing and row_align.
        out: [T, H]; written, or with accumulate added to. Allocated when absent.
    """
    capacity = step_capacity(routing.T, routing.K, routing.E, row_align)
    check_rows("activations", activations, capacity, experts.I, experts.dtype or activations.dtype)
    check_accumulate(out, accumulate)
    if out is None:
        out = activations.new_empty(routing.T, experts.H)
    check_out(out, activations.new_empty(routing.T, 0), experts.H)
    if _through_torch_op(activations, routing.topk_weights, *experts.tensors.values()):
        from . import torch_ops

        return torch_ops.down_projection(activations, routing, experts, row_align, out, accumulate, backend)
    problem = Problem.of(routing.T, routing.K, experts, activations.dtype, out.dtype)
    chosen = registry.choose(problem, backend)
    chosen.down_projection(activations.contiguous(), routing, experts, row_align, out, accumulate)
    return out


def _step(name: str, hidden: Tensor, routing: Routing, experts: Experts, row_align: int, backend: str) -> Tensor:
    check_hidden(hidden, routing, experts)
    if _through_torch_op(hidden, *experts.tensors.values()):
        from . import torch_ops

        return torch_ops.step(name, hidden, routing, experts, row_align, backend)
    problem = Problem.of(routing.T, routing.K, experts, hidden.dtype)
    return getattr(registry.choose(problem, backend), name)(hidden.contiguous(), routing, experts, row_align)


def _on_device(hidden: Any, routing: Any, experts: Any, out: Any, accumulate: bool, backend: str) -> Any:
    """ttnn tensors, with a routing and experts on the device: they stay there."""
    if not type(hidden).__module__.startswith("ttnn"):
        raise ContractError("hidden is no tensor", got=type(hidden).__name__, expected="a torch or ttnn tensor")
    if backend not in ("auto", "tenstorrent"):
        raise ContractError("ttnn tensors run on one backend", got=repr(backend), expected="'tenstorrent' or 'auto'")
    from . import tenstorrent

    for name, value, kind in (
        ("routing", routing, tenstorrent.DeviceRouting),
        ("experts", experts, tenstorrent.DeviceExperts),
    ):
        if not isinstance(value, kind):
            raise ContractError(
                f"{name} is not on the device", got=type(value).__name__, expected=f"tenstorrent.{kind.__name__}"
            )
    return tenstorrent.moe(hidden, routing, experts, out=out, accumulate=accumulate)


def _through_torch_op(*tensors: Tensor) -> bool:
    """Under torch.compile, and where autograd is recording (so that a backward pass is refused, not wrong)."""
    if torch.compiler.is_compiling():
        return True
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
