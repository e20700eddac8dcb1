"""The operator's steps on ttnn tensors, for a caller who has the routing by expert, or wants the tensors in between.

    routing = ExpertRouting(T, K, num_routed_tokens, routed_tokens, routed_token_weights)  # or route(by_token, experts)
    gate, up = gate_projection(hidden, routing, experts), up_projection(hidden, routing, experts)
    activations = silu_mul(gate, up, routing, experts)  # gate_up(hidden, routing, experts): these three at once
    out = down_projection(activations, routing, experts)

On a mesh each device runs the steps of its own experts, and has rows of its own. Its result is its part of the sum over
the devices. Every function checks its tensors before anything is enqueued; `moe` of layer.py runs the whole operator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ContractError
from . import tensors
from .all_reduce import partial_dtype
from .device import Device
from .experts import DeviceExperts
from .layer import DeviceRouting, check_kind
from .programs import Form, LayerPrograms, Routed, programs_of


@dataclass(frozen=True)
class ExpertRouting:
    """A routing on the device, by expert: a caller's tensors, or what `route` returns.

    bound is T rounded up to a power of two, at least 32. Shapes, dtypes, layouts and places are checked at every step.
    Values are not: tokens of an expert are distinct and in 0 .. T - 1, and the counts of a device's experts add up to
    T * K at most. Other values lead kernels outside of the tensors.

    Attributes:
        T: tokens. K: experts of a token, at most.
        num_routed_tokens: ttnn int32 [1, E], row-major: tokens of each expert. E counts the experts of all devices.
        routed_tokens: ttnn int32 [E, bound], row-major: the tokens of each expert. A row has any values past its count.
        routed_token_weights: ttnn bfloat16 [E, bound], row-major: their weights, in the same order.
            On a mesh a caller's tensors are replicated; those of `route` list each device's own experts.
    """

    T: int
    K: int
    num_routed_tokens: Any
    routed_tokens: Any
    routed_token_weights: Any


def route(routing: DeviceRouting, experts: DeviceExperts) -> ExpertRouting:
    """The routing by expert, of a routing by token; in new tensors.

    Raises:
        ContractError: wrong shapes, dtypes, layouts or devices, or more tokens than one program takes. Nothing was
            enqueued. BackendUnavailable: the device of the experts was closed.
    """
    device = _device_of(routing, DeviceRouting, experts)
    shape = tuple(getattr(routing.topk_ids, "shape", ()))
    if len(shape) != 2 or min(shape) < 1:
        raise ContractError("topk_ids has the wrong shape", got=shape, expected="[T, K], both from 1 on")
    T, K = int(shape[0]), int(shape[1])
    tensors.check("topk_ids", routing.topk_ids, (T, K), ("int32",), "ROW_MAJOR", device)
    tensors.check("topk_weights", routing.topk_weights, (T, K), ("float32",), "ROW_MAJOR", device)
    programs = programs_of(device, experts.sizes(K))
    forms = programs.routing_forms(programs.bound(T))
    with device.turn:
        into = {name: tensors.empty(*form, device) for name, form in forms.items()}
        programs.route(routing.topk_ids, routing.topk_weights, experts.mapping, T, into)
    return ExpertRouting(T, K, **into)


def gate_projection(hidden: Any, routing: ExpertRouting, experts: DeviceExperts, *, out: Any = None) -> Any:
    """Step 1, x Wg of the rows of each expert; arguments, result and errors as `gate_up`."""
    return _projected("gate", hidden, routing, experts, out)


def up_projection(hidden: Any, routing: ExpertRouting, experts: DeviceExperts, *, out: Any = None) -> Any:
    """Step 2, x Wu of the rows of each expert; arguments, result and errors as `gate_up`."""
    return _projected("up", hidden, routing, experts, out)


def gate_up(hidden: Any, routing: ExpertRouting, experts: DeviceExperts, *, out: Any = None) -> Any:
    """Steps 1 to 3 in one program, silu(x Wg) * (x Wu) of the rows of each expert; one rounding to bfloat16.

    Args:
        hidden: ttnn bfloat16 [T, H], row-major; replicated on a mesh.
        routing: of T tokens. experts: from load_experts.
        out: ttnn bfloat16 [experts.step_rows(T, K), I] in tiles, to write to; allocated when absent. I is that of a
            device.

    Returns:
        out. Rows of an expert start at a multiple of 32, in device_expert_mapping order. Other rows are undefined.

    Raises:
        ContractError: wrong shapes, dtypes, layouts or devices, or more tokens than one program takes. Nothing was
            enqueued. BackendUnavailable: the device of the experts was closed.
    """
    return _projected("gate_up", hidden, routing, experts, out)


def silu_mul(gate: Any, up: Any, routing: ExpertRouting, experts: DeviceExperts, *, out: Any = None) -> Any:
    """Step 3, silu(gate) * up over all rows, computed in fp32 and rounded once to bfloat16.

    Args:
        gate, up: as gate_projection and up_projection return them for this routing.
        out, and what else is returned and raised: as for `gate_up`.
    """
    programs, routed = _checked(routing, experts)
    device, form = experts.device, programs.rows_form(routed.bound)
    for name, tensor in (("gate", gate), ("up", up)):
        _check(name, tensor, form, device)
    with device.turn:
        return programs.silu_mul(gate, up, routed.bound, _into(out, form, device))


def down_projection(
    activations: Any, routing: ExpertRouting, experts: DeviceExperts, *, out: Any = None, accumulate: bool = False
) -> Any:
    """Step 4, each row of an expert through Wd, times its routing weight, summed in fp32 over the rows of a token.

    Args:
        activations: as gate_up or silu_mul return them for this routing.
        out: ttnn [T, H] in tiles, bfloat16 or float32, to write to. Allocated when absent: bfloat16; on a mesh float32
            where its devices add up float32.
        accumulate: add to out instead of overwriting it.

    Returns:
        out; on a mesh each device's part of the sum.

    Raises:
        As `gate_up`. ContractError: accumulate without an out, too.
    """
    programs, routed = _checked(routing, experts)
    device, shape = experts.device, (routing.T, experts.H)
    _check("activations", activations, programs.rows_form(routed.bound), device)
    if out is not None:
        tensors.check("out", out, shape, ("bfloat16", "float32"), "TILE", device)
    elif accumulate:
        raise ContractError(
            "accumulate=True needs an out to add to",
            got="no out",
            expected=f"out: a ttnn tensor {list(shape)} in tiles, bfloat16 or float32",
            remedy="pass out, or leave accumulate out",
        )
    with device.turn:
        if out is None:
            out = tensors.empty(shape, "bfloat16" if device.D == 1 else partial_dtype(device), "TILE", device)
        programs.down(activations, routed, experts.down, out, accumulate)
    return out


def _projected(name: str, hidden: Any, routing: ExpertRouting, experts: DeviceExperts, out: Any) -> Any:
    """The product with the weight of this name; "gate_up": activations of both."""
    programs, routed = _checked(routing, experts)
    device = experts.device
    tensors.check("hidden", hidden, (routing.T, experts.H), ("bfloat16",), "ROW_MAJOR", device)
    with device.turn:
        into = _into(out, programs.rows_form(routed.bound), device)
        if name == "gate_up":
            return programs.gate_up(hidden, routed, experts.gate, experts.up, into)
        return programs.project(hidden, routed, getattr(experts, name), name, into)


def _checked(routing: ExpertRouting, experts: DeviceExperts) -> tuple[LayerPrograms, Routed]:
    """The programs of these sizes, and the routing as they read it; raises as `gate_up`."""
    device, T, K = _device_of(routing, ExpertRouting, experts), routing.T, routing.K
    if not (isinstance(T, int) and isinstance(K, int) and min(T, K) >= 1):
        raise ContractError("the routing has no such sizes", got=f"T={T}, K={K}", expected="integers from 1 on")
    programs = programs_of(device, experts.sizes(K))
    bound = programs.bound(T)
    pad = f"ttnn.pad to {bound} columns, T={T} rounded up to a power of two from 32"
    row = f"ttnn.reshape(num_routed_tokens, [1, {experts.E}])"
    given: dict[str, Any] = {"device_expert_mapping": experts.mapping}
    for name, form in programs.routing_forms(bound).items():
        given[name] = getattr(routing, name)
        _check(name, given[name], form, device, row if name == "num_routed_tokens" else pad)
    return programs, Routed(T, bound, given)


def _device_of(routing: Any, kind: type, experts: Any) -> Device:
    """The device of the experts, which is open."""
    check_kind("routing", routing, kind)
    check_kind("experts", experts, DeviceExperts)
    experts.device.check_open()
    return experts.device


def _check(name: str, tensor: Any, form: Form, device: Device, reshape: str | None = None) -> None:
    shape, dtype, layout = form
    tensors.check(name, tensor, shape, (dtype,), layout, device, reshape=reshape)


def _into(out: Any, form: Form, device: Device) -> Any:
    """out, checked; None: a new tensor."""
    if out is None:
        return tensors.empty(*form, device)
    _check("out", out, form, device)
    return out
