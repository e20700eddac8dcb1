"""What watches a call: torch.compile, a tracer, autograd. A backend may run at once only where nothing does."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .errors import ContractError

AUTOGRAD = "autograd"


def watcher(tensors: Iterable[Tensor | None]) -> str | None:
    """What records or transforms a call on these tensors, in words; None: nothing does.

    It reads thread-local state, and the tensors only where gradients are on: under 0.5 us of host time.

    Raises:
        ContractError: torch.jit.trace, which would keep this call's routing for all later ones.
    """
    if torch.compiler.is_dynamo_compiling():
        return "torch.compile or torch.export"
    if torch._C._is_tracing():
        raise ContractError(
            "torch.jit.trace cannot record the operator",
            expected="a tracer that keeps the operator as one node",
            remedy="torch.compile, torch.export or make_fx",
        )
    if torch._C._len_torch_dispatch_stack() or _traced_before_dispatch():
        return "a dispatch mode, such as that of make_fx"
    if torch._C._are_functorch_transforms_active():
        return "a transform of torch.func"
    if forward_ad._current_level >= 0:
        return "a level of forward-mode gradients"
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return AUTOGRAD
    return None


def _traced_before_dispatch() -> bool:
    """Whether make_fx traces with pre_dispatch=True, whose dispatch mode is elsewhere. It has a function mode, too."""
    return bool(torch._C._len_torch_function_stack() and torch._ops._len_torch_dispatch_stack_pre_dispatch())
