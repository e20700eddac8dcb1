"""The operators of a decoder layer as opaque torch operators: torch.compile and graph capture see one node each.

None writes over its arguments: vLLM's compiler drops copies, and does not ask who else reads the original. On one GPU
the residual stream is no argument: it lies beside the layers' experts, and operators add to it in place. Each of these
operators takes what the one before it gave, so no compiler can reorder, merge or drop one.
"""

from __future__ import annotations

from typing import Any, get_type_hints

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name, direct_register_custom_op

from ... import decoder
from ...no_gradients import LIBRARY
from .adapter import held

NAMESPACE = LIBRARY.ns


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """rms_norm(x [T, H]) weight^T + bias -> [T, N]."""
    return decoder.norm_linear(x, norm, eps, weight, bias)


def _norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def linear_add(x: Tensor, attended: Tensor, weight: Tensor, add: bool) -> Tensor:
    """attended [T, N] weight^T, added to x [T, H] or not -> [T, H]."""
    return decoder.linear_add(attended, weight, None, x.clone()) if add else decoder.linear(attended, weight)


def experts(
    x: Tensor, norm: Tensor, eps: float, router: Tensor, K: int, renormalise: bool, layer_name: LayerNameType
) -> Tensor:
    """The experts of rms_norm(x [T, H]), added to x or not -> [T, H]: the layer's method knows.

    Args:
        router: [E, H]. K, renormalise: as decoder.norm_route. layer_name: of vLLM's layer of experts.
    """
    layer = _layer(layer_name)
    out = x.clone() if layer.quant_method.adds else torch.empty_like(x)
    return _experts_to(out, layer, x, norm, eps, router, K, renormalise)


def begin_stream(x: Tensor, norm: Tensor, eps: float, weight: Tensor, layer_name: LayerNameType) -> Tensor:
    """Let x [T, H] be the residual stream -> rms_norm(x) weight^T [T, N]; once a step.

    Args:
        layer_name: of any of vLLM's layers of experts.
    """
    stream = _layer(layer_name).quant_method.stream[: x.shape[0]]
    stream.copy_(x)
    return decoder.norm_linear(stream, norm, eps, weight)


def linear_experts(
    attended: Tensor,
    weight: Tensor,
    norm: Tensor,
    eps: float,
    router: Tensor,
    K: int,
    renormalise: bool,
    next_norm: Tensor,
    next_weight: Tensor | None,
    layer_name: LayerNameType,
) -> Tensor:
    """All that one GPU runs between two attentions. The output projection of attended [T, N], then the experts, are
    added to the residual stream.

    Args:
        weight: [H, N]. norm, router, K, renormalise: as decoder.norm_route. next_norm: [H]. next_weight: [M, H] of the
            next layer; None: there is none.

    Returns:
        rms_norm(stream) next_weight^T [T, M], or rms_norm(stream) [T, H] of the last layer.
    """
    layer = _layer(layer_name)
    stream = layer.quant_method.stream[: attended.shape[0]]
    if (x := decoder.linear_add(attended, weight, None, stream)) is not stream:
        stream.copy_(x)
    _experts_to(stream, layer, stream, norm, eps, router, K, renormalise)
    if next_weight is None:
        return decoder.rms_norm(stream, next_norm, eps)
    return decoder.norm_linear(stream, next_norm, eps, next_weight)


def _layer(name: LayerNameType) -> Any:
    return held(get_forward_context().no_compile_layers[_resolve_layer_name(name)])


def _experts_to(
    out: Tensor, layer: Any, x: Tensor, norm: Tensor, eps: float, router: Tensor, K: int, renormalise: bool
) -> Tensor:
    """The experts of rms_norm(x), added to out or written to it; out may be x."""
    ids, weights, hidden = decoder.norm_route(x, norm, eps, router, K, renormalise)
    layer.quant_method.add(layer, hidden, weights, ids, out)
    return out


def _like_x(x: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(x)


def _projected(x: Tensor, norm: Tensor, eps: float, weight: Tensor, layer_name: LayerNameType) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _between(attended: Tensor, *args: Any) -> Tensor:
    *_, next_norm, next_weight, _ = args
    return attended.new_empty(attended.shape[0], len(next_norm if next_weight is None else next_weight))


def register() -> None:
    """Once a process."""
    for operator, fake in (
        (norm_linear, _norm_linear),
        (linear_add, _like_x),
        (experts, _like_x),
        (begin_stream, _projected),
        (linear_experts, _between),
    ):
        # a schema is made of types, not of their names
        hints = get_type_hints(operator)
        operator.__annotations__ = {name: None if kind is type(None) else kind for name, kind in hints.items()}
        if not hasattr(getattr(torch.ops, NAMESPACE), operator.__name__):
            direct_register_custom_op(operator.__name__, operator, [], fake, target_lib=LIBRARY)


register()
