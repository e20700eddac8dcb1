"""The operator and its steps as torch.library custom ops, so that torch.compile and export see one opaque node.

    ttnn_moe::moe(hidden, topk_ids, topk_weights, *experts, backend) -> out
    ttnn_moe::moe_out(hidden, topk_ids, topk_weights, num_tokens, *experts, backend, accumulate, out)
    ttnn_moe::gate_projection | up_projection | gate_up (hidden, ..., row_align) -> [capacity, I]
    ttnn_moe::silu_mul(gate, up, backend) -> [rows, I]
    ttnn_moe::down_projection(activations, ..., row_align, accumulate, out)

*experts stands for weights, sizes, spec: the format's tensors in the order that spec (Experts.spec) names them, and
[E, H, I]. An op with out writes it. No op has an autograd formula: a backward pass through one raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

from torch import Tensor
from torch.library import custom_op

from . import eager
from .contract import Experts, Routing, check, check_accumulate, check_gate_and_up, check_hidden, step_capacity

# torch.library reads these annotations at run time, and needs Optional spelled out
# ruff: noqa: UP045


def _inputs(
    ids: Tensor,
    topk_weights: Tensor,
    weights: Sequence[Tensor],
    sizes: Sequence[int],
    spec: str,
    num_tokens: Tensor | None = None,
) -> tuple[Routing, Experts]:
    experts = Experts.from_spec(spec, sizes, weights)
    return Routing.from_topk(ids, topk_weights, experts.E, num_tokens=num_tokens), experts


@custom_op("ttnn_moe::moe", mutates_args=())
def _moe(
    hidden: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weights: Sequence[Tensor],
    sizes: Sequence[int],
    spec: str,
    backend: str,
) -> Tensor:
    routing, experts = _inputs(topk_ids, topk_weights, weights, sizes, spec)
    return eager.moe(hidden, routing, experts, None, False, backend)


@_moe.register_fake
def _(hidden, topk_ids, topk_weights, weights, sizes, spec, backend):  # type: ignore[no-untyped-def]
    return hidden.new_empty(hidden.shape)


@custom_op("ttnn_moe::moe_out", mutates_args=("out",))
def _moe_out(
    hidden: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_tokens: Optional[Tensor],
    weights: Sequence[Tensor],
    sizes: Sequence[int],
    spec: str,
    backend: str,
    accumulate: bool,
    out: Tensor,
) -> None:
    routing, experts = _inputs(topk_ids, topk_weights, weights, sizes, spec, num_tokens)
    eager.moe(hidden, routing, experts, out, accumulate, backend)


def _define_step(name: str):  # type: ignore[no-untyped-def]
    @custom_op(f"ttnn_moe::{name}", mutates_args=())
    def op(
        hidden: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        weights: Sequence[Tensor],
        sizes: Sequence[int],
        spec: str,
        backend: str,
        row_align: int,
    ) -> Tensor:
        routing, experts = _inputs(topk_ids, topk_weights, weights, sizes, spec)
        return eager.step(name, hidden, routing, experts, row_align, backend)

    @op.register_fake
    def _(hidden, topk_ids, topk_weights, weights, sizes, spec, backend, row_align):  # type: ignore[no-untyped-def]
        (T, K), (E, _, I) = topk_ids.shape, sizes
        return hidden.new_empty(step_capacity(T, K, E, row_align), I)

    return op


STEPS = {name: _define_step(name) for name in ("gate_projection", "up_projection", "gate_up")}


@custom_op("ttnn_moe::silu_mul", mutates_args=())
def _silu_mul(gate: Tensor, up: Tensor, backend: str) -> Tensor:
    return eager.silu_mul(gate, up, backend)


@_silu_mul.register_fake
def _(gate, up, backend):  # type: ignore[no-untyped-def]
    return gate.new_empty(gate.shape)


@custom_op("ttnn_moe::down_projection", mutates_args=("out",))
def _down_projection(
    activations: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weights: Sequence[Tensor],
    sizes: Sequence[int],
    spec: str,
    backend: str,
    row_align: int,
    accumulate: bool,
    out: Tensor,
) -> None:
    routing, experts = _inputs(topk_ids, topk_weights, weights, sizes, spec)
    eager.down_projection(activations, routing, experts, row_align, out, accumulate, backend)


def moe(
    hidden: Tensor, routing: Routing, experts: Experts, out: Tensor | None, accumulate: bool, backend: str
) -> Tensor:
    """As eager.moe, through the custom op; what breaks the contract raises here, before the graph runs."""
    check(hidden, routing, experts, out)
    check_accumulate(out, accumulate)
    ids, topk_weights, weights = routing.topk_ids, routing.topk_weights, list(experts.tensors.values())
    if out is None and routing.num_tokens is None:
        return _moe(hidden, ids, topk_weights, weights, experts.sizes, experts.spec, backend)
    out = hidden.new_empty(hidden.shape) if out is None else out
    _moe_out(
        hidden, ids, topk_weights, routing.num_tokens, weights, experts.sizes, experts.spec, backend, accumulate, out
    )
    return out


def step(name: str, hidden: Tensor, routing: Routing, experts: Experts, row_align: int, backend: str) -> Tensor:
    """As eager.step, through the custom op."""
    check_hidden(hidden, routing, experts)
    weights = list(experts.tensors.values())
    return STEPS[name](
        hidden, routing.topk_ids, routing.topk_weights, weights, experts.sizes, experts.spec, backend, row_align
    )


def silu_mul(gate: Tensor, up: Tensor, backend: str) -> Tensor:
    """As eager.silu_mul, through the custom op."""
    check_gate_and_up(gate, up)
    return _silu_mul(gate, up, backend)


def down_projection(
    activations: Tensor,
    routing: Routing,
    experts: Experts,
    row_align: int,
    out: Tensor | None,
    accumulate: bool,
    backend: str,
) -> Tensor:
    """As eager.down_projection, through the custom op."""
    out = eager.out_of_down_projection(activations, routing, experts, row_align, out, accumulate)
    weights = list(experts.tensors.values())
    _down_projection(
        activations,
        routing.topk_ids,
        routing.topk_weights,
        weights,
        experts.sizes,
        experts.spec,
        backend,
        row_align,
        accumulate,
        out,
    )
    return out
