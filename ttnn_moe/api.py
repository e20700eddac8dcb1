"""The operator and its steps, as users call them: eager, through torch's custom ops, or on a device's own tensors.

Inference only: under autograd the result is computed, and a backward pass through it raises. Forward-mode gradients
raise at the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import eager, registry
from .backend import Prepared
from .contract import MOST_PAIRS, Experts, Placement, Problem, Routing, check_kind, check_kinds, too_many_pairs
from .errors import BackendUnavailable, ContractError
from .ids import is_distinct
from .memory import check_tensors
from .visible import shown
from .watched import watcher

FEWER = "prepare for fewer tokens T, and make several calls"


def moe(
    hidden: Tensor,
    routing: Routing,
    experts: Experts,
    *,
    out: Tensor | None = None,
    accumulate: bool = False,
    backend: str = "auto",
    ids: str = "any",
) -> Tensor:
    """One Mixture-of-Experts layer: route, gate and up, SiLU*mul, down, weigh, sum.

    With ttnn tensors, routing and experts are those of ttnn_moe.tenstorrent, and nothing leaves the device.

    Args:
        hidden: [T, H] bf16, fp16 or fp32; a non-contiguous one is copied.
        routing: Routing.from_topk(topk_ids [T, K], topk_weights [T, K], E).
        experts: Experts.dense(gate_up [E, 2I, H], down [E, H, I]), or another format.
        out: contiguous [T, H] in the dtype of hidden or fp32, to write to; it shares no memory with what the call
            reads. Rows past routing.num_tokens are not written. When absent, it is allocated in the dtype of hidden,
            and these rows are undefined.
        accumulate: add to out instead of overwriting it.
        backend: a name in registry.backends(), or "auto".
        ids: "any", or "distinct": the caller promises that each row of topk_ids names K different experts of
            0 .. E-1, as a router's top-k does. Ascend then makes fewer device operations. Where the promise is broken,
            numbers are wrong, and no memory out of bounds is touched.

    Returns:
        out [T, H].

    Raises:
        ContractError: inputs that break the contract. BackendUnavailable: nothing can run it. GradientsRefused:
            forward-mode gradients are asked for, or a backward pass runs.
    """
    if not isinstance(hidden, Tensor):
        is_distinct(ids)
        return _on_device(hidden, routing, experts, out, accumulate, backend)
    form = _form(hidden, routing, experts, out)
    return form.moe(hidden, routing.promised(ids), experts, out, accumulate, backend)


def prepare(
    problem: Problem, experts: Experts, placement: Placement | None = None, backend: str = "auto", *, ids: str = "any"
) -> Prepared:
    """Make one layer ready for calls of up to problem.T tokens: op(hidden, topk_ids, topk_weights) -> out.

    It owns workspace, compiled kernels and peer buffers. A call allocates its output, in problem.out_dtype, and what
    the backend's operators allocate. ids in calls are global expert ids. With a placement of D > 1 devices and no rank,
    one process drives the mesh: experts are those of all devices. With a rank, experts are the E/D of that rank, and
    the result is its partial sum.

    Threads may share a layer. On a CPU their calls take turns. On a GPU each stream has workspace of its own, made at
    its first call, which layers of one problem share. A captured graph uses that of the stream that captured it: keep
    the layer as long as the graph, and replay graphs of one stream one after the other.

    A layer is for inference: a call that autograd or a tracer would record raises ContractError.

    Args:
        ids: what the caller promises of topk_ids in every call, as for `moe`.

    Raises:
        ContractError: experts, problem and placement do not fit, or ids is no promise.
        BackendUnavailable: nothing can run it, or the host has too little memory for the workspace.
    """
    full, distinct = described(problem, experts, placement), is_distinct(ids)
    chosen = registry.choose(full, backend)
    # a workspace made under inference_mode could not be written outside it
    with torch.inference_mode(False), torch.no_grad(), _room_for(full):
        made = chosen.prepare(full, experts, placement)
    made.distinct = distinct
    return made


@contextmanager
def _room_for(problem: Problem) -> Iterator[None]:
    """Turn the host's lack of memory in the block into BackendUnavailable. torch.OutOfMemoryError, a GPU's, passes."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        _, found, lack = str(error).partition("DefaultCPUAllocator: ")
        if not (found or isinstance(error, MemoryError)):
            raise
        raise BackendUnavailable(
            "the machine has no room for the workspace of a layer",
            got=f"{problem}; {lack or 'MemoryError'}",
            expected="sizes that fit its memory",
            remedy=FEWER,
        ) from error


def described(problem: Problem, experts: Experts, placement: Placement | None) -> Problem:
    """The problem with what experts and placement say of it: format, device, D.

    Raises:
        ContractError: they do not fit.
    """
    check_kind(problem, Problem)
    check_kind(experts, Experts)
    if too_many_pairs(problem) is not None:
        raise ContractError(
            "too many token-expert pairs",
            got=f"T={shown(problem.T)}, K={shown(problem.K)}",
            expected=f"T * K <= {MOST_PAIRS}, which int32 counts",
            remedy=FEWER,
        )
    if placement is not None and not isinstance(placement, Placement):
        remedy = f"backend={placement!r}" if isinstance(placement, str) else None
        raise ContractError(
            "placement is no Placement", got=shown(placement), expected="a ttnn_moe.Placement, or None", remedy=remedy
        )
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
        raise ContractError(
            "experts have another dtype",
            got=experts.dtype,
            expected=problem.dtype,
            remedy="make the problem with Problem.of(T, K, experts, experts.dtype), or cast the experts",
        )
    held = Problem.of(problem.T, problem.K, experts, problem.dtype, problem.out_dtype)
    return replace(held, E=problem.E, D=D)


def gate_projection(
    hidden: Tensor, routing: Routing, experts: Experts, *, row_align: int = 1, backend: str = "auto"
) -> Tensor:
    """Gate projection alone: x Wg of each token and each different expert of it, [capacity, I] in the dtype of hidden.

    Args:
        hidden: [T, H]. routing, experts: as for `moe`.
        row_align: the first row of every expert is a multiple of it. Tenstorrent's is 32; for another the host moves
            rows.

    Returns:
        [capacity, I]. `routing.step_layout(row_align)` says which row is which pair; padding is undefined.

    Raises:
        ContractError: inputs that break the contract. BackendUnavailable: nothing can run it.
    """
    return _step("gate_projection", hidden, routing, experts, row_align, backend)


def up_projection(
    hidden: Tensor, routing: Routing, experts: Experts, *, row_align: int = 1, backend: str = "auto"
) -> Tensor:
    """Up projection alone: x Wu of each token and each different expert of it, [capacity, I]. As `gate_projection`."""
    return _step("up_projection", hidden, routing, experts, row_align, backend)


def gate_up(hidden: Tensor, routing: Routing, experts: Experts, *, row_align: int = 1, backend: str = "auto") -> Tensor:
    """Activations silu(x Wg) * (x Wu) of each token and each different expert of it, [capacity, I].

    Arguments are those of `gate_projection`. One kernel or call where the backend has one; `Numerics` says where it
    rounds.
    """
    return _step("gate_up", hidden, routing, experts, row_align, backend)


def silu_mul(gate: Tensor, up: Tensor, *, backend: str = "auto") -> Tensor:
    """silu(gate) * up, computed in fp32 and rounded once to their dtype: [rows, I].

    Args:
        gate, up: [rows, I], both bf16, fp16 or fp32, on one device.

    Raises:
        ContractError: another dtype or number of dimensions; shapes, dtypes or devices that differ.
        BackendUnavailable: nothing can run it.
    """
    check_tensors(gate=gate, up=up)
    return _form_for(watcher((gate, up))).silu_mul(gate, up, backend)


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
    """Down projection and weighted sum: activations through Wd, times the routing weights, summed per token: [T, H].

    Args:
        activations: [capacity, I] as gate_up returns them, for the same routing and row_align.
        out: [T, H] in the dtype of activations or fp32; written, or with accumulate added to. Allocated when absent.

    Raises:
        ContractError: inputs that break the contract. BackendUnavailable: nothing can run it.
    """
    form = _form(activations, routing, experts, out)
    return form.down_projection(activations, routing, experts, row_align, out, accumulate, backend)


def _step(name: str, hidden: Tensor, routing: Routing, experts: Experts, row_align: int, backend: str) -> Tensor:
    return _form(hidden, routing, experts).step(name, hidden, routing, experts, row_align, backend)


def _on_device(hidden: Any, routing: Any, experts: Any, out: Any, accumulate: bool, backend: str) -> Any:
    """ttnn tensors, with a routing and experts on the device: they stay there."""
    if not type(hidden).__module__.startswith("ttnn"):
        raise ContractError("hidden is no tensor", got=type(hidden).__name__, expected="a torch or ttnn tensor")
    if backend not in ("auto", "tenstorrent"):
        raise ContractError("ttnn tensors run on one backend", got=repr(backend), expected="'tenstorrent' or 'auto'")
    from . import tenstorrent

    return tenstorrent.moe(hidden, routing, experts, out=out, accumulate=accumulate)


def _form(rows: Tensor, routing: Routing, experts: Experts, out: Tensor | None = None) -> Any:
    """The module that runs a call: torch_ops where something watches it, else eager."""
    check_kinds(rows, routing, experts, out)
    if torch.is_grad_enabled():
        return _form_for(watcher((rows, routing.topk_weights, out, *experts.tensors.values())))
    return _form_for(watcher(()))


def _form_for(found: str | None) -> Any:
    if found is None:
        return eager
    from . import torch_ops

    return torch_ops
