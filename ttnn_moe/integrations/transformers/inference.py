"""A result that autograd knows, and whose backward pass is refused by name when it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from ...errors import TtnnMoeError


class BackwardRefused(TtnnMoeError, RuntimeError):
    """Gradients were asked of the operator, which has none."""


@custom_op("ttnn_moe::refuse_backward", mutates_args=())
def _refuse_backward(grad: Tensor, shape: Sequence[int]) -> Tensor:
    raise BackwardRefused(
        "the experts implementation of ttnn_moe is for inference: it has no backward pass",
        remedy='to train, model.set_experts_implementation("grouped_mm"); else call the model under torch.no_grad()',
    )


@_refuse_backward.register_fake
def _(grad, shape):  # type: ignore[no-untyped-def]
    return grad.new_empty(shape)


class InferenceOnly(torch.autograd.Function):
    """apply(operator, *inputs) -> operator(), recorded as a function of inputs.

    The gradient of each input is an op that raises. So a compiler may trace a backward pass that never runs.
    """

    @staticmethod
    def forward(ctx: Any, operator: Callable[[], Tensor], *inputs: Tensor) -> Tensor:
        ctx.shapes = [tensor.shape for tensor in inputs]
        return operator()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return None, *(_refuse_backward(grad, shape) for shape in ctx.shapes)
