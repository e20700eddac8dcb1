"""Which of two paths the whole layer takes, and the weights that the path reads: torch_npu's operators, or Triton's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..backend import store
from ..contract import Experts, Problem, Routing
from ..errors import BackendUnavailable, ContractError
from . import kernels, operators, run
from .layout import ENV, NZ_ALIGN, Weights, nz_asked_for, weights_of
from .limits import INNER


def moe(npu: Any, hidden: Tensor, routing: Routing, weights: Weights, out: Tensor, accumulate: bool) -> None:
    """Write, or add, the layer's result to out [T, H] in the dtype of hidden or fp32; hidden is contiguous."""
    if routing.T:
        total = result(npu, hidden, routing, weights, accumulate or out.dtype != hidden.dtype)
        store(total, out, accumulate, routing.num_tokens)


def result(npu: Any, hidden: Tensor, routing: Routing, weights: Weights, wide: bool) -> Tensor:
    """The layer's result in a new tensor [T, H]: fp32 if wide, else in the dtype of hidden.

    npu: torch_npu, or what stands for it. routing: ids of the experts in weights. Rows past num_tokens are undefined.
    """
    if not routing.T:
        return hidden.new_empty(hidden.shape, dtype=torch.float32 if wide else hidden.dtype)
    return (kernels if kernels.asked_for() else run).result(npu, hidden, routing, weights, wide)


def experts(npu: Any, rows: Tensor, counts: Tensor, weights: Weights) -> Tensor:
    """[rows, H]: rows [rows, H], sorted by expert, each through its expert; those of no expert are undefined.

    counts: [E] int64, how many rows each expert has; they come first.
    """
    return (kernels if kernels.asked_for() else run).experts(npu, rows, counts, weights)


def weights(npu: Any, experts: Experts) -> Weights:
    """The weights as the path reads them; Triton's kernels read them in place."""
    return weights_of(experts, npu if nz_asked_for() and not kernels.asked_for() else None)


def why_not(npu: Callable[[], Any], problem: Problem) -> str | None:
    """Why the path, or the layout of weights, that the environment asks for cannot serve, or None.

    npu: gives torch_npu, where the layout needs it.
    """
    try:
        nz, triton = nz_asked_for(), kernels.asked_for()
        if triton:
            kernels.load()
    except (BackendUnavailable, ContractError) as error:
        return str(error).removesuffix(".")
    return _why_not_nz(npu(), problem) if nz and not triton else None  # Triton's kernels read the weights in place


def _why_not_nz(npu: Any, problem: Problem) -> str | None:
    remedy = f"; to fix it: unset {ENV}"
    if operators.missing(npu, (operators.FORMAT,)):
        return f"{ENV}=1 needs {operators.FORMAT}, and this torch_npu has none{remedy}"
    if problem.H % NZ_ALIGN or problem.I % NZ_ALIGN:
        return f"{ENV}=1 needs H and I to be multiples of {NZ_ALIGN}, not H={problem.H}, I={problem.I}{remedy}"
    if 2 * problem.I >= INNER:  # the last axis of gate and up in this layout
        return f"{ENV}=1 needs 2I to be under {INNER}, not I={problem.I}{remedy}"
    return None
