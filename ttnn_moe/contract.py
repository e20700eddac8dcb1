"""The operator's contract: every shape and dtype rule, checked once per call on the host, without a device sync.

    out[t] = sum over k of  w[t,k] * (silu(x[t] Wg_e) * (x[t] Wu_e)) Wd_e,   e = ids[t,k],  silu(z) = z / (1 + exp(-z))

Experts may have biases and another activation: see `Experts` and `activations.py`.

Names: T tokens, E experts, K experts per token, H hidden size, I expert intermediate size, D devices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import ContractError
from .experts import Experts
from .memory import check_tensors, first_shared
from .placement import Placement
from .problem import HIDDEN_DTYPES, MOST_PAIRS, Problem, check_kind, or_float32, too_many_pairs
from .routing import Routing
from .routing_views import PaddedView, SortedView, StepLayout, step_capacity
from .visible import shown

__all__ = [
    "HIDDEN_DTYPES",
    "MOST_PAIRS",
    "Experts",
    "PaddedView",
    "Placement",
    "Problem",
    "Routing",
    "SortedView",
    "StepLayout",
    "check",
    "check_accumulate",
    "check_memory",
    "check_down_projection",
    "check_gate_and_up",
    "check_hidden",
    "check_kind",
    "check_kinds",
    "check_out",
    "check_prepared",
    "check_rows_and_out",
    "or_float32",
    "step_capacity",
    "too_many_pairs",
]


def check(hidden: Tensor, routing: Routing, experts: Experts, out: Tensor | None = None) -> Problem:
    """Check one call and describe it. Never reads a tensor's values.

    Raises:
        ContractError: naming what is wrong, what was expected, and the remedy.
    """
    check_hidden(hidden, routing, experts)
    if out is not None:
        check_out(out, hidden, routing.T, experts.H)
    return Problem.of(routing.T, routing.K, experts, hidden.dtype, None if out is None else out.dtype)


def check_rows_and_out(rows: object, out: object) -> None:
    """The rows must be a tensor, and out too where it is given."""
    if not (_is_plain(rows) and (out is None or _is_plain(out))):
        check_tensors(hidden=rows, **({} if out is None else {"out": out}))


def _is_plain(value: object) -> bool:
    return type(value) is Tensor and not value.is_nested


def check_kinds(rows: object, routing: object, experts: object, out: object) -> None:
    """The arguments of a call must be tensors, a Routing and Experts."""
    check_rows_and_out(rows, out)
    check_kind(routing, Routing)
    check_kind(experts, Experts)


def check_hidden(hidden: Tensor, routing: Routing, experts: Experts) -> None:
    """hidden [T, H] must fit the routing and the experts, in sizes, dtype and device."""
    shape = routing.T, experts.H
    if hidden.shape != shape:
        raise ContractError(
            "hidden has the wrong shape",
            got=tuple(hidden.shape),
            expected=f"[T, H] = {shape}",
            remedy=_remedy_of_shape(hidden, experts.H, experts.I),
        )
    _check_together("hidden", hidden, routing, experts)


def _remedy_of_shape(hidden: Tensor, H: int, I: int) -> str | None:
    """For hidden that is not [T, H], with experts of these sizes."""
    if hidden.dim() == 3:
        return "flatten batch and sequence to T: hidden.reshape(-1, H)"
    if hidden.dim() == 2 and hidden.shape[1] == I != H:
        return (
            f"H={H} and I={I} of the experts look exchanged; Experts.from_projections takes gate and up [E, H, I] and "
            "down [E, I, H]: give it weights of nn.Linear as weight.transpose(1, 2)"
        )
    return None


def check_down_projection(
    activations: Tensor, routing: Routing, experts: Experts, row_align: int, out: Tensor | None, accumulate: bool
) -> Problem:
    """Check a down projection: activations [capacity, I], and the rest as `check`. Returns its problem."""
    shape = step_capacity(routing.T, routing.K, routing.E, row_align), experts.I
    if tuple(activations.shape) != shape:
        raise ContractError(
            "activations have the wrong shape",
            got=tuple(activations.shape),
            expected=f"[capacity, I] = {shape}",
            remedy="take the row_align of the step that made them",
        )
    _check_together("activations", activations, routing, experts)
    check_accumulate(out, accumulate)
    if out is not None:
        check_out(out, activations, routing.T, experts.H)
    return Problem.of(routing.T, routing.K, experts, activations.dtype, None if out is None else out.dtype)


def _check_together(name: str, rows: Tensor, routing: Routing, experts: Experts) -> None:
    """Rows, routing and experts must agree on dtype, E and device."""
    dtype, weights_dtype = rows.dtype, experts.dtype
    if dtype not in HIDDEN_DTYPES:
        raise ContractError(f"{name} has an unsupported dtype", got=dtype, expected=list(HIDDEN_DTYPES))
    if weights_dtype is not None and dtype != weights_dtype:
        raise ContractError(
            f"{name} and the expert weights have different dtypes",
            got=f"{dtype} and {weights_dtype}",
            expected="one dtype",
            remedy=f"{name}.to({weights_dtype})",
        )
    if routing.E != experts.E:
        raise ContractError(
            "routing and experts disagree on E",
            got=f"{routing.E} and {experts.E}",
            expected="the same number of experts",
            remedy="Routing.for_device and Experts.for_device go together",
        )
    if not rows.device == routing.topk_ids.device == experts.device:
        raise ContractError(
            "tensors are on different devices",
            got=f"{name} {rows.device}, topk_ids {routing.topk_ids.device}, experts {experts.device}",
            expected="one device",
        )


def check_out(out: Tensor, rows: Tensor, T: int, H: int) -> None:
    """out [T, H] must be writable in place: device of rows, their dtype or fp32, contiguous."""
    if out.layout is not torch.strided:
        raise ContractError("out is not dense", got=out.layout, expected="row-major [T, H]")
    if out.shape != (T, H) or out.device != rows.device:
        raise ContractError(
            "out has the wrong shape or device",
            got=f"{tuple(out.shape)} on {out.device}",
            expected=f"{(T, H)} on {rows.device}",
        )
    if out.dtype not in (rows.dtype, torch.float32):
        raise ContractError("out has the wrong dtype", got=out.dtype, expected=or_float32(rows.dtype))
    if not out.is_contiguous():
        raise ContractError("out is not contiguous", got=f"strides {out.stride()}", expected="row-major [T, H]")


def check_memory(out: Tensor, routing: Routing, *read: Tensor) -> None:
    """A kernel must be able to write to out, and out must share no memory with what the call reads.

    It reads addresses, so it is for calls that run now, not for traced ones. read: contiguous tensors.
    """
    if out.is_neg():
        raise ContractError("out is a negative view of other values", remedy="pass a plain tensor")
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise ContractError(
            "out was made under torch.inference_mode, and the call is outside it",
            expected="an out that autograd may see written",
            remedy="make out outside inference_mode, or call inside it",
        )
    bound = () if routing.num_tokens is None else (routing.num_tokens,)
    shared = first_shared(out, *read, routing.topk_ids, routing.topk_weights, *bound)
    if shared is not None:
        raise ContractError(
            "out shares memory with an argument",
            got=f"one that is {tuple(shared.shape)} {shared.dtype}",
            expected="separate memory",
            remedy="pass another out, or none",
        )


def check_prepared(
    problem: Problem, device: torch.device, hidden: Tensor, routing: Routing, out: Tensor | None, accumulate: bool
) -> None:
    """What a prepared layer checks on every call, but for `check_memory`. device: that of its experts."""
    T, K = routing.topk_ids.shape
    if hidden.shape != (T, problem.H) or hidden.dtype != problem.dtype:
        raise ContractError(
            "hidden does not fit the prepared problem",
            got=f"{tuple(hidden.shape)} {hidden.dtype}",
            expected=f"{(T, problem.H)} {problem.dtype}",
            remedy=_remedy_of_shape(hidden, problem.H, problem.I),
        )
    if not hidden.device == routing.topk_ids.device == device:
        raise ContractError(
            "tensors are on another device than the prepared layer",
            got=f"hidden {hidden.device}, topk_ids {routing.topk_ids.device}",
            expected=f"both on {device}",
        )
    if T > problem.T or K != problem.K:
        raise ContractError(
            "the call is larger than the prepared problem",
            got=f"T={T}, K={K}",
            expected=f"T <= {problem.T}, K = {problem.K}",
            remedy="prepare for the largest T that will be used",
        )
    check_accumulate(out, accumulate)
    if out is not None:
        check_out(out, hidden, T, problem.H)


def check_accumulate(out: Tensor | None, accumulate: bool) -> None:
    """Adding needs an out to add to."""
    if accumulate is not True and accumulate is not False:
        raise ContractError("accumulate is no bool", got=shown(accumulate), expected="True or False")
    if accumulate and out is None:
        raise ContractError("accumulate=True needs something to add to", got="out=None", expected="out [T, H]")


def check_gate_and_up(gate: Tensor, up: Tensor) -> None:
    """gate and up must both be [rows, I], of one dtype, on one device."""
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.device != up.device or gate.dim() != 2:
        raise ContractError(
            "gate and up do not fit together",
            got=f"{tuple(gate.shape)} {gate.dtype} and {tuple(up.shape)} {up.dtype}",
            expected="both [rows, I], one dtype, one device",
        )
    if gate.dtype not in HIDDEN_DTYPES:
        raise ContractError("gate and up have an unsupported dtype", got=gate.dtype, expected=list(HIDDEN_DTYPES))
