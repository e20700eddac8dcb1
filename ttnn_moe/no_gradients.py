"""Torch ops that compute, and refuse every gradient: the one gate between the operator and autograd.

The output of a recorded call has a backward pass that raises. Forward-mode gradients are refused at the call. The gate
is the op's own autograd kernel. So it holds in eager mode, in compiled and exported graphs, and for make_fx.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import Library, custom_op, register_fake
from torch.utils import _pytree as pytree

from .errors import GradientsRefused

LIBRARY = Library("ttnn_moe", "FRAGMENT")


def define_op(name: str, schema: str, run: Callable[..., Tensor], fake: Callable[..., Tensor]) -> Any:
    """The op ttnn_moe::name, which mutates nothing and returns one new tensor.

    Args:
        schema: arguments and result, without the name.
        run: the op. fake: its result's shape, for tracing.
    """
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    op = getattr(torch.ops.ttnn_moe, name).default

    def gate(keyset: Any, *args: Any) -> Tensor:
        tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]

        def below() -> Tensor:
            with torch._C._AutoDispatchBelowAutograd():
                return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)

        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)):
            # _NoGradients does not see the gradients of torch.func's transforms
            if any(map(_is_differentiated, tensors)):
                raise _refusal("a transform of torch.func asks the operator for gradients, and it has none", _OUTSIDE)
            return below()
        return _NoGradients.apply(below, *tensors)  # type: ignore[no-any-return]

    # a compiler that looks into the backend would trace it
    LIBRARY.impl(name, torch._disable_dynamo(run), "CompositeExplicitAutograd")
    LIBRARY.impl(name, gate, "Autograd", with_keyset=True)
    register_fake(f"ttnn_moe::{name}", fake, lib=LIBRARY)
    return op


def without_gradients(run: Callable[[], Tensor], *inputs: Tensor) -> Tensor:
    """run(), a function of these inputs that is no op: a backward pass through its result raises.

    Raises:
        GradientsRefused: forward-mode gradients, or a transform of torch.func.
    """
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, inputs)):
        raise _refusal("a transform of torch.func cannot look into a call of kernels", _OUTSIDE)
    return _NoGradients.apply(run, *inputs)  # type: ignore[no-any-return]


def _is_differentiated(tensor: Tensor) -> bool:
    """Whether the innermost transform of torch.func asks for gradients by a tensor, backward or forward."""
    return tensor.requires_grad or forward_ad.unpack_dual(tensor, level=0).tangent is not None


class _NoGradients(torch.autograd.Function):
    """apply(run, *inputs) -> run(), recorded as a function of inputs.

    The gradient of each input is an op that raises. So a compiler may trace a backward pass that never runs.
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Tensor], *inputs: Tensor) -> Tensor:
        ctx.shapes = [tensor.shape for tensor in inputs]
        return run()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        needed = zip(ctx.needs_input_grad[1:], ctx.shapes, strict=True)
        return None, *(_refuse(grad, shape) if needs else None for needs, shape in needed)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise _refusal("forward-mode gradients were asked of the operator, and it has none", _OUTSIDE)


@custom_op("ttnn_moe::refuse_backward", mutates_args=())
def _refuse(grad: Tensor, shape: Sequence[int]) -> Tensor:
    raise _refusal("the operator is for inference: it has no backward pass", "call it under torch.no_grad()")


@_refuse.register_fake
def _(grad, shape):  # type: ignore[no-untyped-def]
    return grad.new_empty(shape)


_OUTSIDE = "call it outside of the transform or level, on tensors without tangents"


def _refusal(what: str, instead: str) -> GradientsRefused:
    """instead: what a caller who trains no model may do."""
    return GradientsRefused(
        what,
        remedy='to train a model of transformers, model.set_experts_implementation("grouped_mm"); one with MXFP4 '
        'experts, load it again with experts_implementation="eager" and Mxfp4Config(dequantize=True); '
        f"else {instead}",
    )
