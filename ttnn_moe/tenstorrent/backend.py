"""The Tenstorrent backend for torch tensors: it moves them to the device, and the result back.

The first call on some experts loads their weights (experts.py). They stay on the device as long as the Experts object
lives, and are loaded again after a change in place. An inference tensor does not say that it changed: make new Experts.
TTNN_MOE_TT_WEIGHTS names the formats. A model on the device uses layer.py: it has ttnn tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..backend import Numerics, Probe
from ..contract import Experts, Placement, Problem, Routing
from ..errors import ContractError
from ..sizes import power_of_2
from . import device as devices
from . import tensors
from .experts import DeviceExperts, weight_format
from .host import PreparedTenstorrent, loaded, run
from .layer_sizes import Sizes
from .programs import LayerPrograms, Routed, programs_of
from .weight_formats import ModelFormats

ROW_ALIGN = 32


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
        if (reason := problem.beyond_silu()) is not None:
            return reason
        # ttnn_moe.silu_mul asks for a layer of one expert with H = I: it has no H, and another program
        alone = problem.E == problem.K == 1 and problem.H == problem.I
        if problem.H % 32 or problem.I % 32:
            if alone:
                return f"I must be a multiple of 32, the side of a tile, not {problem.I}; to fix it: pad the columns"
            return f"H and I must be multiples of 32, the side of a tile, not H={problem.H}, I={problem.I}"
        return None if alone else _why_no_program(problem)

    def numerics(self, problem: Problem) -> Numerics:
        """Sums are fp32; on Wormhole's simulator a sum that is read again passes through TF32 (`unpacks_to_dest`)."""
        return Numerics(activation=torch.bfloat16, routing_weight=torch.bfloat16)

    def prepare(self, problem: Problem, experts: Experts, placement: Placement | None) -> PreparedTenstorrent:
        return PreparedTenstorrent(problem, experts, placement)

    def moe(self, hidden: Tensor, routing: Routing, experts: Experts, out: Tensor, accumulate: bool) -> None:
        if routing.T:
            run(hidden, routing, loaded(experts), out, accumulate)

    def gate_projection(self, hidden: Tensor, routing: Routing, experts: Experts, row_align: int) -> Tensor:
        return _step(hidden, routing, experts, row_align, lambda on, x, to, held: on.project(x, to, held.gate, "gate"))

    def up_projection(self, hidden: Tensor, routing: Routing, experts: Experts, row_align: int) -> Tensor:
        return _step(hidden, routing, experts, row_align, lambda on, x, to, held: on.project(x, to, held.up, "up"))

    def gate_up(self, hidden: Tensor, routing: Routing, experts: Experts, row_align: int) -> Tensor:
        return _step(hidden, routing, experts, row_align, lambda on, x, to, held: on.gate_up(x, to, held.gate, held.up))

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        rows, I = gate.shape
        out = torch.empty_like(gate, memory_format=torch.contiguous_format)
        if not rows or not I:
            return out
        device = devices.current() or devices.open_device()
        # a layer of one expert: every row goes to it
        programs = programs_of(device, Sizes(1, 1, 1, 32, I))
        bound = max(32, power_of_2(rows))
        moved = []
        with device.turn:
            for tensor in (gate, up):
                padded = tensor.new_zeros(programs.rows(bound), I)
                padded[:rows] = tensor
                moved.append(tensors.replicate(padded, device, "TILE"))
            out.copy_(tensors.to_torch(programs.silu_mul(moved[0], moved[1], bound), device)[:rows])
        return out

    def down_projection(
        self, activations: Tensor, routing: Routing, experts: Experts, row_align: int, out: Tensor, accumulate: bool
    ) -> None:
        if not routing.T:
            return
        there = _loaded_for_steps(experts)
        with there.device.turn:
            for part, own, here, rows in _passes(routing, there, row_align):
                given = activations
                if here is not None:
                    given = activations.new_zeros(own.step_layout(ROW_ALIGN).capacity, there.I)
                    given[rows] = activations[here]
                self._down(given, own, there, out[part], accumulate)

    def _down(self, activations: Tensor, routing: Routing, there: DeviceExperts, out: Tensor, accumulate: bool) -> None:
        """One pass; out is overwritten or added to."""
        programs, routed = _route(routing, there)
        whole = activations.new_zeros(programs.rows(routed.bound), there.I)
        rows = min(len(whole), len(activations))
        whole[:rows] = activations[:rows]
        into = tensors.replicate(out, there.device, "TILE")
        programs.down(tensors.replicate(whole, there.device, "TILE"), routed, there.down, into, accumulate)
        n = routing.true_tokens()
        out[:n] = tensors.to_torch(into, there.device)[:n]


def _why_no_program(problem: Problem) -> str | None:
    """None, or why the device in use, or the one that TTNN_MOE_TT_DEVICE names, does not run these sizes."""
    device = devices.current() or devices.emulated_to_plan_for(problem.D)
    if device is None:
        return None
    D = device.D
    if problem.D not in (1, D):
        return f"a mesh of {D} devices is open, and the placement has {problem.D}; to fix it: {devices.CLOSE}"
    if problem.E % D:
        return f"the {D} devices that are open cannot share E={problem.E} experts evenly; to fix it: {devices.CLOSE}"
    try:
        formats = ModelFormats.parse(weight_format()).experts()
        programs_of(device, replace(Sizes.of(problem, str(formats)), E_local=problem.E // D))
    except ContractError as error:
        return str(error)
    return None


def _loaded_for_steps(experts: Experts) -> DeviceExperts:
    """The experts on one device, in order: rows of step tensors have that order.

    Raises:
        ContractError: a mesh is in use.
    """
    device = devices.current()
    if device is not None and device.D > 1:
        raise ContractError(
            "the steps run on one device",
            got=f"a mesh of {device.D}",
            expected="D=1",
            remedy="call moe(), or close_device() and open_device(1), or backend='reference'",
        )
    return loaded(experts, Placement.uniform(experts.E))


def _passes(routing: Routing, there: DeviceExperts, row_align: int) -> Iterator[tuple[slice, Routing, Any, Any]]:
    """Parts of the tokens that one program takes: (tokens, their routing, rows of the step tensors, rows of the part).

    The device's rows are aligned to tiles. Where one part is all and the caller's rows are too, there are no rows.
    """
    most = programs_of(there.device, there.sizes(routing.K)).max_T
    if routing.T <= most and row_align == ROW_ALIGN:
        yield slice(0, routing.T), routing, None, None
        return
    whole, T = routing.step_layout(row_align).inverse, routing.true_tokens()
    for first in range(0, T, most):
        part = slice(first, min(first + most, T))
        own = Routing.from_topk(routing.ids[part], routing.topk_weights[part], routing.E)
        rows, here = own.step_layout(ROW_ALIGN).inverse, whole[part]
        pairs = here >= 0
        yield part, own, here[pairs].long(), rows[pairs].long()


def _route(routing: Routing, there: DeviceExperts) -> tuple[LayerPrograms, Routed]:
    programs = programs_of(there.device, there.sizes(routing.K))
    programs.bound(routing.T)
    ids = tensors.replicate(routing.ids, there.device)
    weights = tensors.replicate(routing.topk_weights, there.device)
    return programs, programs.route(ids, weights, there.mapping, routing.T)


def _step(
    hidden: Tensor,
    routing: Routing,
    experts: Experts,
    row_align: int,
    launch: Callable[[LayerPrograms, Any, Routed, DeviceExperts], Any],
) -> Tensor:
    """[capacity, I]: the rows that launch(programs, hidden on the device, routed, experts there) returns."""
    out = hidden.new_empty(routing.step_layout(row_align).capacity, experts.I)
    if len(out):
        there = _loaded_for_steps(experts)
        with there.device.turn:
            for part, own, here, rows in _passes(routing, there, row_align):
                programs, routed = _route(own, there)
                there_rows = launch(programs, tensors.replicate(hidden[part], there.device), routed, there)
                got = tensors.to_torch(there_rows, there.device)
                if here is None:
                    # the device's buffer ends with the last block; rows past it are undefined
                    n = min(len(got), len(out))
                    out[:n] = got[:n]
                else:
                    out[here] = got[rows]
    return out
