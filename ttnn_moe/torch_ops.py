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

from typing import Any

from torch import Tensor
from torch.library import custom_op

from . import eager
from .contract import Experts, Routing, check, check_accumulate, check_gate_and_up, check_hidden, step_capacity

ROUTING = "Tensor topk_ids, Tensor topk_weights"
EXPERTS = "Tensor[] weights, SymInt[] sizes, str spec, str backend"


def _packed(routing: Routing, experts: Experts) -> tuple[Any, ...]:
    """ROUTING and EXPERTS, but for the backend."""
    return routing.topk_ids, routing.topk_weights, list(experts.tensors.values()), experts.sizes, experts.spec


def _unpacked(
    ids: Tensor, topk_weights: Tensor, weights: Any, sizes: Any, spec: str, num_tokens: Tensor | None = None
) -> tuple[Routing, Experts]:
    experts = Experts.from_spec(spec, sizes, weights)
    return Routing.from_topk(ids, topk_weights, experts.E, num_tokens=num_tokens), experts


@custom_op("ttnn_moe::moe", mutates_args=(), schema=f"(Tensor hidden, {ROUTING}, {EXPERTS}) -> Tensor")
def _moe(hidden: Tensor, *inputs: Any) -> Tensor:
    *packed, backend = inputs
    return eager.moe(hidden, *_unpacked(*packed), None, False, backend)


@custom_op(
    "ttnn_moe::moe_out",
    mutates_args=("out",),
    schema=f"(Tensor hidden, {ROUTING}, Tensor? num_tokens, {EXPERTS}, bool accumulate, Tensor(a!) out) -> ()",
)
def _moe_out(hidden: Tensor, ids: Tensor, topk_weights: Tensor, num_tokens: Tensor | None, *inputs: Any) -> None:
    weights, sizes, spec, backend, accumulate, out = inputs
    packed = ids, topk_weights, weights, sizes, spec
    eager.moe(hidden, *_unpacked(*packed, num_tokens), out, accumulate, backend)


def _define_step(name: str) -> Any:
    schema = f"(Tensor hidden, {ROUTING}, {EXPERTS}, SymInt row_align) -> Tensor"

    @custom_op(f"ttnn_moe::{name}", mutates_args=(), schema=schema)
    def op(hidden: Tensor, *inputs: Any) -> Tensor:
        *packed, backend, row_align = inputs
        return eager.step(name, hidden, *_unpacked(*packed), row_align, backend)

    @op.register_fake
    def _(hidden: Tensor, topk_ids: Tensor, _weights: Tensor, _tensors: Any, sizes: Any, *others: Any) -> Tensor:
        (T, K), (E, _, I) = topk_ids.shape, sizes
        return hidden.new_empty(step_capacity(T, K, E, others[-1]), I)

    return op


STEPS = {name: _define_step(name) for name in ("gate_projection", "up_projection", "gate_up")}


@custom_op("ttnn_moe::silu_mul", mutates_args=())
def _silu_mul(gate: Tensor, up: Tensor, backend: str) -> Tensor:
    return eager.silu_mul(gate, up, backend)


@_moe.register_fake
@_silu_mul.register_fake
def _(rows: Tensor, *_: Any) -> Tensor:
    return rows.new_empty(rows.shape)


@custom_op(
    "ttnn_moe::down_projection",
    mutates_args=("out",),
    schema=f"(Tensor activations, {ROUTING}, {EXPERTS}, SymInt row_align, bool accumulate, Tensor(a!) out) -> ()",
)
def _down_projection(activations: Tensor, *inputs: Any) -> None:
    *packed, backend, row_align, accumulate, out = inputs
    eager.down_projection(activations, *_unpacked(*packed), row_align, out, accumulate, backend)


def moe(
    hidden: Tensor, routing: Routing, experts: Experts, out: Tensor | None, accumulate: bool, backend: str
) -> Tensor:
    """As eager.moe, through the custom op. Raises here, before the graph runs, what breaks the contract."""
    check(hidden, routing, experts, out)
    check_accumulate(out, accumulate)
    if out is None and routing.num_tokens is None:
        return _moe(hidden, *_packed(routing, experts), backend)
    out = hidden.new_empty(hidden.shape) if out is None else out
    ids, topk_weights, *weights = _packed(routing, experts)
    _moe_out(hidden, ids, topk_weights, routing.num_tokens, *weights, backend, accumulate, out)
    return out


def step(name: str, hidden: Tensor, routing: Routing, experts: Experts, row_align: int, backend: str) -> Tensor:
    """As eager.step, through the custom op."""
    check_hidden(hidden, routing, experts)
    return STEPS[name](hidden, *_packed(routing, experts), backend, row_align)


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
    _down_projection(activations, *_packed(routing, experts), backend, row_align, accumulate, out)
    return out
