"""The operators of a decoder layer as opaque torch operators: torch.compile and graph capture see one node each.

None writes over its arguments: vLLM's compiler drops copies, and does not ask who else reads the original.
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
from .attention import Metadata

NAMESPACE = LIBRARY.ns


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """rms_norm(x [T, H]) weight^T + bias -> [T, N]."""
    return decoder.norm_linear(x, norm, eps, weight, bias)


def _norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def linear_add(x: Tensor, attended: Tensor, weight: Tensor, add: bool) -> Tensor:
    """attended [T, N] weight^T, added to x [T, H] or not -> [T, H]."""
    return decoder.linear_add(attended, weight, None, x.clone()) if add else torch.mm(attended, weight.t())


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


def linear_experts(
    x: Tensor,
    attended: Tensor,
    weight: Tensor,
    norm: Tensor,
    eps: float,
    router: Tensor,
    K: int,
    renormalise: bool,
    layer_name: LayerNameType,
) -> Tensor:
    """linear_add, then experts, both added to x: what one GPU runs after attention, with one copy of x."""
    x = decoder.linear_add(attended, weight, None, x.clone())
    return _experts_to(x, _layer(layer_name), x, norm, eps, router, K, renormalise)


def _layer(name: LayerNameType) -> Any:
    return held(get_forward_context().no_compile_layers[_resolve_layer_name(name)])


def _experts_to(
    out: Tensor, layer: Any, x: Tensor, norm: Tensor, eps: float, router: Tensor, K: int, renormalise: bool
) -> Tensor:
    """The experts of rms_norm(x), added to out or written to it; out may be x."""
    ids, weights, hidden = decoder.norm_route(x, norm, eps, router, K, renormalise)
    layer.quant_method.add(layer, hidden, weights, ids, out, _true_tokens(get_forward_context().attn_metadata))
    return out


def _like_x(x: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(x)


def _true_tokens(metadata: Any) -> Tensor | None:
    """[] int32, tokens of a decode step that are no padding; None: all."""
    found = next(iter(metadata.values()), None) if isinstance(metadata, dict) else None
    return found.count if isinstance(found, Metadata) and found.decode else None


def register() -> None:
    """Once a process."""
    for operator, fake in (
        (norm_linear, _norm_linear),
        (linear_add, _like_x),
        (experts, _like_x),
        (linear_experts, _like_x),
    ):
        # a schema is made of types, not of their names
        hints = get_type_hints(operator)
        operator.__annotations__ = {name: None if kind is type(None) else kind for name, kind in hints.items()}
        if not hasattr(getattr(torch.ops, NAMESPACE), operator.__name__):
            direct_register_custom_op(operator.__name__, operator, [], fake, target_lib=LIBRARY)


register()
