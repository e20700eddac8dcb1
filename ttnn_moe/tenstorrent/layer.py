"""The whole operator on ttnn tensors, for a model that lives on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ContractError
from . import tensors
from .all_reduce import sum_over_devices
from .experts import DeviceExperts
from .programs import LayerPrograms, programs_of
from .runtime import library

_MOST_READY = 64  # calls whose tensors' forms are remembered to be right, for each layer


_MAKERS = {
    "DeviceRouting": "DeviceRouting(topk_ids, topk_weights)",
    "ExpertRouting": "route(by_token, experts), or ExpertRouting(T, K, ...) of your tensors",
    "DeviceExperts": "load_experts(...), which puts tiles in the order that kernels read",
}
"""What makes an argument of each kind."""


def check_kind(name: str, value: object, kind: type) -> None:
    """Raise ContractError unless the argument of this name is of its kind, one of _MAKERS."""
    if not isinstance(value, kind):
        raise ContractError(
            f"{name} is of another kind",
            got=f"a {type(value).__name__}",
            expected=f"a tenstorrent.{kind.__name__}",
            remedy=_MAKERS[kind.__name__],
        )


@dataclass(frozen=True)
class DeviceRouting:
    """A routing on the device.

    Attributes:
        topk_ids: ttnn int32 [T, K], row-major; global expert ids. An id outside 0 .. E-1 names no expert.
        topk_weights: ttnn float32 [T, K], row-major. On a mesh both are replicated.
    """

    topk_ids: Any
    topk_weights: Any


def moe(
    hidden: Any, routing: DeviceRouting, experts: DeviceExperts, *, out: Any = None, accumulate: bool = False
) -> Any:
    """One Mixture-of-Experts layer on ttnn tensors; see ttnn_moe.moe. Nothing returns to the host.

    Args:
        hidden: ttnn bfloat16 [T, H], row-major; replicated on a mesh.
        routing: the same T. experts: from load_experts.
        out: ttnn [T, H] in tiles, bfloat16 or float32, to write to; allocated (bfloat16) when absent. On a mesh it is
            replicated, and costs a copy.
        accumulate: add to out instead of overwriting it. The sum is fp32, and rounds once to the dtype of out. On a
            mesh every device adds the sum over the devices to its copy of out.

    Returns:
        out.

    Raises:
        ContractError: wrong kinds, shapes, dtypes, layouts or devices, or more tokens than one program takes. Nothing
            was enqueued. BackendUnavailable: the device of the experts was closed.
    """
    check_kind("routing", routing, DeviceRouting)
    check_kind("experts", experts, DeviceExperts)
    experts.device.check_open()
    given = (hidden, routing.topk_ids, routing.topk_weights, out)
    forms = tensors.forms(given, experts.device)
    key = None if forms is None else (hidden.logical_volume(), routing.topk_ids.logical_volume(), accumulate)
    ready = experts.ready.get(key)
    if ready is None or ready[0] != forms:
        ready = (forms, *_check(*given, experts, accumulate))
        if key is not None:
            if len(experts.ready) >= _MOST_READY:
                experts.ready.clear()
            experts.ready[key] = ready
    _, programs, T = ready
    if out is None and experts.device.D == 1:
        out = tensors.empty((T, experts.H), "bfloat16", "TILE", experts.device)
    return run(programs, hidden, routing.topk_ids, routing.topk_weights, experts, out, T, accumulate)


def _check(
    hidden: Any, topk_ids: Any, topk_weights: Any, out: Any, experts: DeviceExperts, accumulate: bool
) -> tuple[LayerPrograms, int]:
    """The programs of a call and its T; raises as `moe`."""
    device = experts.device
    shapes = [tuple(getattr(x, "shape", ())) for x in (hidden, topk_ids)]
    if any(len(shape) != 2 for shape in shapes):
        raise ContractError(
            "hidden and topk_ids must have two dimensions",
            got=f"{shapes[0]} and {shapes[1]}",
            expected="[T, H] and [T, K]",
        )
    T, K = int(hidden.shape[0]), int(topk_ids.shape[1])
    if T == 0:
        raise ContractError("ttnn has no empty tensors to run on", got="T=0", expected="T >= 1", remedy="skip the call")
    tensors.check("hidden", hidden, (T, experts.H), ("bfloat16",), "ROW_MAJOR", device)
    tensors.check("topk_ids", topk_ids, (T, K), ("int32",), "ROW_MAJOR", device)
    tensors.check("topk_weights", topk_weights, (T, K), ("float32",), "ROW_MAJOR", device)
    if accumulate and out is None:
        raise ContractError(
            "accumulate=True needs an out to add to",
            got="no out",
            expected=f"out: a ttnn tensor [{T}, {experts.H}] in tiles, bfloat16 or float32",
            remedy="pass out, or leave accumulate out",
        )
    programs = programs_of(device, experts.sizes(K))
    programs.bound(T)
    if out is not None:
        tensors.check("out", out, (T, experts.H), ("bfloat16", "float32"), "TILE", device)
    return programs, T


def run(
    programs: LayerPrograms,
    hidden: Any,
    topk_ids: Any,
    topk_weights: Any,
    experts: DeviceExperts,
    out: Any,
    T: int,
    accumulate: bool,
) -> Any:
    """Run the programs of one call, and on a mesh the sum over its devices. Arguments were checked.

    Returns:
        out; where that is None, which a mesh allows: the sum, bfloat16.
    """
    ttnn = library()

    with experts.device.turn:
        routed = programs.route(topk_ids, topk_weights, experts.mapping, T)
        activations = programs.gate_up(hidden, routed, experts.gate, experts.up)
        if experts.device.D == 1:
            programs.down(activations, routed, experts.down, out, accumulate)
            return out
        partial = programs.partial(T)
        programs.down(activations, routed, experts.down, partial, False)
        if out is None:
            return sum_over_devices(partial, T, ttnn.bfloat16, experts.device)
        if accumulate:
            # Wormhole's simulator adds no two fp32 tensors: there partial and total are bfloat16
            cast = partial.dtype == ttnn.float32 and out.dtype != ttnn.float32
            start = ttnn.typecast(out, ttnn.float32) if cast else out
            total = sum_over_devices(partial, T, partial.dtype, experts.device)
            whole = ttnn.add(total, start, dtype=start.dtype)
            whole = ttnn.typecast(whole, out.dtype) if cast else whole
        else:
            whole = sum_over_devices(partial, T, out.dtype, experts.device)
        ttnn.copy(whole, out)
        return out
