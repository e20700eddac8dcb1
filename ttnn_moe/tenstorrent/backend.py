"""The Tenstorrent backend for torch tensors: they are moved to the device, and the result is moved back.

The first call on some experts loads their weights (weights.py); they stay on the device as long as the Experts
object lives. TTNN_MOE_TT_WEIGHTS=bfloat8_b loads them in 8 bits. A model on the device passes ttnn tensors instead.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..backend import Numerics, Probe
from ..contract import Experts, Placement, Problem, Routing
from ..errors import ContractError
from ..sizes import power_of_2
from . import device as devices
from . import ops, tensors
from .operators import Operators, Routed, Sizes, operators
from .weights import FORMATS, DeviceExperts, load_experts

if TYPE_CHECKING:
    from .prepared import PreparedTenstorrent

WEIGHTS = "TTNN_MOE_TT_WEIGHTS"
ROW_ALIGN = 32

_LOADED: weakref.WeakKeyDictionary[Experts, DeviceExperts] = weakref.WeakKeyDictionary()


def loaded(experts: Experts, placement: Placement | None = None) -> DeviceExperts:
    """The experts on the device in use; loaded at the first call."""
    found = _LOADED.get(experts)
    if found is not None and found.device is devices.current() and found.weight_format == weight_format():
        there = found.placement.device_expert_mapping
        if placement is None or torch.equal(placement.device_expert_mapping, there):
            return found
    found = _LOADED[experts] = load_experts(experts, placement=placement, weight_format=weight_format())
    return found


def weight_format() -> str:
    """bfloat16, or what TTNN_MOE_TT_WEIGHTS says."""
    return os.environ.get(WEIGHTS) or FORMATS[0]


class TenstorrentBackend:
    """See the module's docstring."""

    name = "tenstorrent"
    row_align = ROW_ALIGN

    @classmethod
    def probe(cls) -> Probe:
        return devices.probe()

    def why_not(self, problem: Problem) -> str | None:
        if problem.device != "cpu":
            return f"it moves torch tensors from the CPU, and these are on {problem.device!r}; to fix it: .cpu()"
        if problem.dtype != torch.bfloat16:
            return f"it runs bfloat16, not {problem.dtype}; to fix it: convert hidden and weights"
        if problem.weight_format != "dense":
            return f"it runs dense weights, not {problem.weight_format!r}"
        if problem.H % 32 or problem.I % 32:
            return f"H and I must be multiples of 32, the side of a tile, not H={problem.H}, I={problem.I}"
        return None

    def numerics(self, problem: Problem) -> Numerics:
        """Sums are fp32; on Wormhole a sum that is read again passes through TF32 (device.UNPACK_TO_DEST)."""
        return Numerics(activation=torch.bfloat16, routing_weight=torch.bfloat16)

    def prepare(self, problem: Problem, experts: Experts, placement: Placement | None) -> PreparedTenstorrent:
        from .prepared import PreparedTenstorrent

        return PreparedTenstorrent(problem, experts, placement)

    def moe(self, hidden: Tensor, routing: Routing, experts: Experts, out: Tensor, accumulate: bool) -> None:
        if routing.T:
            run(hidden, routing, loaded(experts), out, accumulate)

    def gate_projection(self, hidden: Tensor, routing: Routing, experts: Experts, row_align: int) -> Tensor:
        return self._project(hidden, routing, experts, row_align, "gate")

    def up_projection(self, hidden: Tensor, routing: Routing, experts: Experts, row_align: int) -> Tensor:
        return self._project(hidden, routing, experts, row_align, "up")

    def _project(self, hidden: Tensor, routing: Routing, experts: Experts, row_align: int, name: str) -> Tensor:
        out = _step_rows(hidden, routing, experts, row_align)
        if len(out):
            there = loaded(experts)
            layer, routed = _route(routing, there)
            moved = tensors.replicate(hidden, there.device)
            _rows_back(layer.project(moved, routed, getattr(there, name), name), out, there)
        return out

    def gate_up(self, hidden: Tensor, routing: Routing, experts: Experts, row_align: int) -> Tensor:
        out = _step_rows(hidden, routing, experts, row_align)
        if len(out):
            there = loaded(experts)
            layer, routed = _route(routing, there)
            moved = tensors.replicate(hidden, there.device)
            _rows_back(layer.gate_up(moved, routed, there.gate, there.up), out, there)
        return out

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        rows, I = gate.shape
        out = torch.empty_like(gate, memory_format=torch.contiguous_format)
        if not rows or not I:
            return out
        device = devices.current() or devices.open_device()
        # one expert that every row goes to: as many rows as there are
        layer = operators(device, Sizes(1, 1, 1, 32, -(-I // 32) * 32))
        bound = max(32, power_of_2(rows))
        whole = layer.rows(bound), layer.sizes.I
        moved = []
        for tensor in (gate, up):
            padded = tensor.new_zeros(whole)
            padded[:rows, :I] = tensor
            moved.append(tensors.replicate(padded, device, "TILE"))
        out.copy_(tensors.to_torch(layer.silu_mul(moved[0], moved[1], bound), device)[:rows, :I])
        return out

    def down_projection(
        self, activations: Tensor, routing: Routing, experts: Experts, row_align: int, out: Tensor, accumulate: bool
    ) -> None:
        if not routing.T:
            return
        _check_align(row_align)
        there = loaded(experts)
        layer, routed = _route(routing, there)
        whole = activations.new_zeros(layer.rows(routed.bound), experts.I)
        rows = min(len(whole), len(activations))
        whole[:rows] = activations[:rows]
        into = tensors.replicate(out, there.device, "TILE")
        layer.down(tensors.replicate(whole, there.device, "TILE"), routed, there.down, into, accumulate)
        out.copy_(tensors.to_torch(into, there.device))


def run(hidden: Tensor, routing: Routing, experts: DeviceExperts, out: Tensor, accumulate: bool) -> None:
    """The operator on torch tensors, in passes of as many tokens as one program takes."""
    device = experts.device
    layer = operators(device, Sizes.of_experts(experts, routing.K))
    ids, weights = _ids(routing), routing.topk_weights.float().contiguous()
    T = routing.T if routing.num_tokens is None else min(int(routing.num_tokens), routing.T)
    for first in range(0, T, layer.max_T):
        part = slice(first, min(first + layer.max_T, T))
        moved = [tensors.replicate(x[part], device) for x in (hidden, ids, weights)]
        on_device = accumulate and device.D == 1
        if on_device:
            into = tensors.replicate(out[part], device, "TILE")
        else:
            kind = "float32" if out.dtype == torch.float32 else "bfloat16"
            into = tensors.empty((part.stop - first, experts.H), kind, "TILE", device)
        ops.run(layer, moved[0], moved[1], moved[2], experts, into, part.stop - first, on_device)
        got = tensors.to_torch(into, device)
        if accumulate and not on_device:
            out[part] += got
        else:
            out[part] = got


def _ids(routing: Routing) -> Tensor:
    """int32 ids; those that int32 does not hold, and all others outside 0 .. E-1, as -1."""
    ids = routing.topk_ids
    return torch.where((ids < 0) | (ids >= routing.E), -1, ids).int().contiguous()


def _route(routing: Routing, there: DeviceExperts) -> tuple[Operators, Routed]:
    if there.device.D > 1:
        raise ContractError("the steps run on one device", got=f"a mesh of {there.device.D}", expected="D=1")
    layer = operators(there.device, Sizes.of_experts(there, routing.K))
    layer.bound(routing.T)
    ids = tensors.replicate(_ids(routing), there.device)
    weights = tensors.replicate(routing.topk_weights.float().contiguous(), there.device)
    return layer, layer.route(ids, weights, there.mapping, routing.T)


def _check_align(row_align: int) -> None:
    if row_align != ROW_ALIGN:
        raise ContractError(
            "rows of step tensors are aligned to tiles here",
            got=f"row_align={row_align}",
            expected=f"row_align={ROW_ALIGN}",
        )


def _step_rows(hidden: Tensor, routing: Routing, experts: Experts, row_align: int) -> Tensor:
    _check_align(row_align)
    return hidden.new_empty(routing.step_layout(row_align).capacity, experts.I)


def _rows_back(rows: object, out: Tensor, there: DeviceExperts) -> None:
    """What the device's buffer holds of out's rows; the others are undefined, as all rows past the last block are."""
    got = tensors.to_torch(rows, there.device)
    n = min(len(got), len(out))
    out[:n] = got[:n]
