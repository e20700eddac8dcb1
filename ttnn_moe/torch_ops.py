"""The operator and its steps as torch ops, so that torch.compile, export, make_fx and autograd see one opaque node.

    ttnn_moe::moe(hidden, *routing, *experts, base, accumulate, wide, distinct) -> [T, H]
    ttnn_moe::gate_projection | up_projection | gate_up (hidden, *routing, *experts, row_align) -> [capacity, I]
    ttnn_moe::silu_mul(gate, up, backend) -> [rows, I]
    ttnn_moe::down_projection(activations, *routing, *experts, row_align, base, accumulate, wide) -> [T, H]

*routing stands for topk_ids, topk_weights, num_tokens. *experts stands for weights, sizes, spec, backend: the format's
tensors in the order that spec (Experts.spec) names them, and [E, H, I]. The result starts as base:
accumulate adds to it, and rows from num_tokens on keep it. Without base, wide asks for an fp32 result.

No op writes to its arguments, and none has gradients: see no_gradients.py. A call with out copies the result there, so
that autograd and compilers see who wrote it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import eager
from .contract import (
    Experts,
    Routing,
    check,
    check_accumulate,
    check_down_projection,
    check_gate_and_up,
    check_hidden,
    step_capacity,
)
from .no_gradients import define_op
from .registry import check_name

ROUTING = "Tensor topk_ids, Tensor topk_weights, Tensor? num_tokens"
EXPERTS = "Tensor[] weights, SymInt[] sizes, str spec, str backend"
INTO = "Tensor? base, bool accumulate, bool wide"


def _packed(routing: Routing, experts: Experts) -> tuple[Any, ...]:
    """ROUTING and EXPERTS, but for the backend."""
    held = list(experts.tensors.values()), experts.sizes, experts.spec
    return routing.topk_ids, routing.topk_weights, routing.num_tokens, *held


def _unpacked(
    ids: Tensor, topk_weights: Tensor, num_tokens: Tensor | None, weights: Any, sizes: Any, spec: str
) -> tuple[Routing, Experts]:
    experts = Experts.from_spec(spec, sizes, weights)
    return Routing.from_topk(ids, topk_weights, experts.E, num_tokens=num_tokens), experts


def _into(base: Tensor | None, wide: bool, like: Tensor, shape: tuple[int, int]) -> Tensor:
    """A new tensor for the result; a copy of base where there is one."""
    if base is not None:
        return base.clone(memory_format=torch.contiguous_format)
    return like.new_empty(shape, dtype=torch.float32 if wide else like.dtype)


def _moe(hidden: Tensor, *inputs: Any) -> Tensor:
    *packed, backend, base, accumulate, wide, distinct = inputs
    routing, experts = _unpacked(*packed)
    # a backend may return a tensor of its own
    out = None if base is None and not wide else _into(base, wide, hidden, (routing.T, experts.H))
    routing = routing.promised("distinct" if distinct else "any")
    return eager.moe(hidden, routing, experts, out, accumulate, backend)


def _down_projection(activations: Tensor, *inputs: Any) -> Tensor:
    *packed, backend, row_align, base, accumulate, wide = inputs
    routing, experts = _unpacked(*packed)
    out = _into(base, wide, activations, (routing.T, experts.H))
    return eager.down_projection(activations, routing, experts, row_align, out, accumulate, backend)


def _fake_moe(hidden: Tensor, *inputs: Any) -> Tensor:
    *others, _ = inputs
    return _rows_of_tokens(hidden, *others)


def _rows_of_tokens(rows: Tensor, topk_ids: Tensor, *inputs: Any) -> Tensor:
    (_, _, _, (_, H, _), *_, base, _, wide) = inputs
    return _into(base, wide, rows, (topk_ids.shape[0], H))


def _define_step(name: str) -> Any:
    def run(hidden: Tensor, *inputs: Any) -> Tensor:
        *packed, backend, row_align = inputs
        return eager.step(name, hidden, *_unpacked(*packed), row_align, backend)

    def fake(hidden: Tensor, topk_ids: Tensor, *inputs: Any) -> Tensor:
        (T, K), (E, _, I), row_align = topk_ids.shape, inputs[3], inputs[-1]
        return hidden.new_empty(step_capacity(T, K, E, row_align), I)

    return define_op(name, f"(Tensor hidden, {ROUTING}, {EXPERTS}, SymInt row_align) -> Tensor", run, fake)


MOE = define_op("moe", f"(Tensor hidden, {ROUTING}, {EXPERTS}, {INTO}, bool distinct) -> Tensor", _moe, _fake_moe)
STEPS = {name: _define_step(name) for name in ("gate_projection", "up_projection", "gate_up")}
SILU_MUL = define_op(
    "silu_mul",
    "(Tensor gate, Tensor up, str backend) -> Tensor",
    eager.silu_mul,
    lambda gate, up, backend: gate.new_empty(gate.shape),
)
DOWN_PROJECTION = define_op(
    "down_projection",
    f"(Tensor activations, {ROUTING}, {EXPERTS}, SymInt row_align, {INTO}) -> Tensor",
    _down_projection,
    _rows_of_tokens,
)


def moe(
    hidden: Tensor, routing: Routing, experts: Experts, out: Tensor | None, accumulate: bool, backend: str
) -> Tensor:
    """As eager.moe, through the op. Raises here, before the graph runs, what breaks the contract.

    With torch.compile(fullgraph=True) the text is in torch's own error, torch._dynamo.exc.Unsupported. Where sizes are
    dynamic, dynamo cannot build the text, and its error names only the line that raises.
    """
    check_name(backend)
    check(hidden, routing, experts, out)
    check_accumulate(out, accumulate)
    into = _arguments(out, accumulate, routing)
    return _written(MOE(hidden, *_packed(routing, experts), backend, *into, routing.distinct), out)


def step(name: str, hidden: Tensor, routing: Routing, experts: Experts, row_align: int, backend: str) -> Tensor:
    """As eager.step, through the op."""
    check_name(backend)
    check_hidden(hidden, routing, experts)
    return STEPS[name](hidden, *_packed(routing, experts), backend, row_align)


def silu_mul(gate: Tensor, up: Tensor, backend: str) -> Tensor:
    """As eager.silu_mul, through the op."""
    check_name(backend)
    check_gate_and_up(gate, up)
    return SILU_MUL(gate, up, backend)


def down_projection(
    activations: Tensor,
    routing: Routing,
    experts: Experts,
    row_align: int,
    out: Tensor | None,
    accumulate: bool,
    backend: str,
) -> Tensor:
    """As eager.down_projection, through the op."""
    check_name(backend)
    check_down_projection(activations, routing, experts, row_align, out, accumulate)
    into = _arguments(out, accumulate, routing)
    return _written(DOWN_PROJECTION(activations, *_packed(routing, experts), backend, row_align, *into), out)


def _arguments(out: Tensor | None, accumulate: bool, routing: Routing) -> tuple[Tensor | None, bool, bool]:
    """INTO."""
    read = accumulate or routing.num_tokens is not None
    return out if read else None, accumulate, out is not None and out.dtype == torch.float32


def _written(result: Tensor, out: Tensor | None) -> Tensor:
    return result if out is None else out.copy_(result)
