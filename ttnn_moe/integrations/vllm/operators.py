"""The operators of a decoder layer as opaque torch operators: torch.compile and graph capture see one node each.

Those that end in an underscore write their result over x, the residual stream.
"""

from __future__ import annotations

from typing import Any, get_type_hints

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name, direct_register_custom_op

from ... import decoder
from ...no_gradients import LIBRARY
from .attention import Metadata

NAMESPACE = LIBRARY.ns


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """rms_norm(x [T, H]) weight^T + bias -> [T, N]."""
    return decoder.norm_linear(x, norm, eps, weight, bias)


def _norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def linear_(x: Tensor, attended: Tensor, weight: Tensor, add: bool) -> None:
    """attended [T, N] weight^T, written over x [T, H], or added to it."""
    if not add:
        torch.mm(attended, weight.t(), out=x)
    elif (out := decoder.linear_add(attended, weight, None, x)) is not x:
        x.copy_(out)


def experts_(
    x: Tensor, norm: Tensor, eps: float, router: Tensor, K: int, renormalise: bool, layer_name: LayerNameType
) -> None:
    """The experts of rms_norm(x [T, H]), written over x, or added to it: the layer's method knows.

    Args:
        router: [E, H]. K, renormalise: as decoder.norm_route. layer_name: of vLLM's layer of experts.
    """
    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    ids, weights, hidden = decoder.norm_route(x, norm, eps, router, K, renormalise)
    layer.quant_method.add(layer, hidden, weights, ids, x, _true_tokens(context.attn_metadata))


def _true_tokens(metadata: Any) -> Tensor | None:
    """[] int32, tokens of a decode step that are no padding; None: all."""
    found = next(iter(metadata.values()), None) if isinstance(metadata, dict) else None
    return found.count if isinstance(found, Metadata) and found.decode else None


def _nothing(*args: Any) -> None:
    """Operators that only write over x."""


def register() -> None:
    """Once a process."""
    for operator, fake, writes in (
        (norm_linear, _norm_linear, []),
        (linear_, _nothing, ["x"]),
        (experts_, _nothing, ["x"]),
    ):
        # a schema is made of types, not of their names
        hints = get_type_hints(operator)
        operator.__annotations__ = {name: None if kind is type(None) else kind for name, kind in hints.items()}
        if not hasattr(getattr(torch.ops, NAMESPACE), operator.__name__):
            direct_register_custom_op(operator.__name__, operator, writes, fake, target_lib=LIBRARY)


register()
