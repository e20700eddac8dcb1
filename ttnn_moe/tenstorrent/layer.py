"""The whole operator on ttnn tensors, for a model that lives on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import ContractError
from . import tensors
from .all_reduce import partial_dtype, partial_rows, sum_over_devices
from .experts import DeviceExperts
from .programs import LayerPrograms, Sizes, programs_of


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
            replicated.
        accumulate: add to out instead of overwriting it; not on a mesh.

    Returns:
        out.

    Raises:
        ContractError: wrong shapes, dtypes, layouts or devices, or more tokens than one program takes. Nothing was
            enqueued.
    """
    device = experts.device
    shapes = [tuple(getattr(x, "shape", ())) for x in (hidden, routing.topk_ids)]
    if any(len(shape) != 2 for shape in shapes):
        raise ContractError(
            "hidden and topk_ids must have two dimensions",
            got=f"{shapes[0]} and {shapes[1]}",
            expected="[T, H] and [T, K]",
        )
    T, K = int(hidden.shape[0]), int(routing.topk_ids.shape[1])
    if T == 0:
        raise ContractError("ttnn has no empty tensors to run on", got="T=0", expected="T >= 1", remedy="skip the call")
    tensors.check("hidden", hidden, (T, experts.H), ("bfloat16",), "ROW_MAJOR", device)
    tensors.check("topk_ids", routing.topk_ids, (T, K), ("int32",), "ROW_MAJOR", device)
    tensors.check("topk_weights", routing.topk_weights, (T, K), ("float32",), "ROW_MAJOR", device)
    if accumulate and (out is None or device.D > 1):
        raise ContractError(
            "accumulate=True needs an out to add to, on one device",
            got=f"out={type(out).__name__}, D={device.D}",
            expected="out=ttnn.Tensor, D=1",
            remedy="add the result with ttnn.add",
        )
    programs = programs_of(device, Sizes.of_experts(experts, K))
    programs.bound(T)
    if out is None:
        out = tensors.empty((T, experts.H), "bfloat16", "TILE", device)
    tensors.check("out", out, (T, experts.H), ("bfloat16", "float32"), "TILE", device)
    run(programs, hidden, routing.topk_ids, routing.topk_weights, experts, out, T, accumulate)
    return out


def run(
    programs: LayerPrograms,
    hidden: Any,
    topk_ids: Any,
    topk_weights: Any,
    experts: DeviceExperts,
    out: Any,
    T: int,
    accumulate: bool,
) -> None:
    """Run the programs of one call, and on a mesh the sum over its devices. Arguments were checked."""
    with experts.device.turn:
        routed = programs.route(topk_ids, topk_weights, experts.mapping, T)
        activations = programs.gate_up(hidden, routed, experts.gate, experts.up)
        if experts.device.D == 1:
            programs.down(activations, routed, experts.down, out, accumulate)
            return
        rows = partial_rows(int(out.shape[0]), experts.H, experts.device)
        partial = tensors.empty((rows, experts.H), partial_dtype(experts.device), "TILE", experts.device)
        programs.down(activations, routed, experts.down, partial, False)
        sum_over_devices(partial, out, experts.device)
