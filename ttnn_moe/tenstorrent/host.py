"""The operator on torch tensors: weights are loaded once; tokens move to the device in passes, results move back."""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor

from ..backend import Prepared
from ..contract import Experts, Placement, Problem, Routing
from ..errors import ContractError
from ..memory import states
from . import device as devices
from . import layer, tensors
from .experts import DeviceExperts, load_experts, weight_format
from .programs import programs_of
from .weight_formats import ModelFormats

# with the states that the tensors had
_Loaded = weakref.WeakKeyDictionary[Experts, tuple[object, DeviceExperts]]
_LOADING = threading.Lock()


def loaded(experts: Experts, placement: Placement | None = None) -> DeviceExperts:
    """The experts on the device in use. The first call loads them, and so does one after a change that
    `memory.states` sees.

    Args:
        placement: which device holds which experts; None: as they lie there, and in order if they do not.
    """
    formats = ModelFormats.parse(weight_format()).experts()
    with _LOADING:
        now = states(experts.tensors.values())
        device = devices.current()
        here = _Loaded() if device is None else _loaded_on(device)
        known, found = here.get(experts, (None, None))
        if found is not None and (known, found.formats) == (now, formats):
            if placement is None or _same(placement, found.placement):
                return found
        found = None
        here.pop(experts, None)  # its memory is free for what comes now
        made = load_experts(experts, placement=placement, weight_format=str(formats))
        _loaded_on(made.device)[experts] = now, made
        return made


def _loaded_on(device: devices.Device) -> _Loaded:
    """They go with the device: an emulated one is memory of this host."""
    return device.cache.setdefault("loaded experts", _Loaded())


def _same(a: Placement, b: Placement | None) -> bool:
    return b is not None and torch.equal(a.device_expert_mapping, b.device_expert_mapping)


def run(hidden: Tensor, routing: Routing, experts: DeviceExperts, out: Tensor, accumulate: bool) -> None:
    """Run the operator on torch tensors, in passes of the most tokens that one program takes. Threads take turns.

    Raises:
        BackendUnavailable: the device of the experts was closed.
    """
    experts.device.check_open()
    with experts.device.turn:
        T = routing.true_tokens()
        most = programs_of(experts.device, experts.sizes(routing.K)).max_T
        for first in range(0, T, most):
            _run_pass(hidden, routing, experts, out, accumulate, slice(first, min(first + most, T)))


def _run_pass(
    hidden: Tensor, routing: Routing, experts: DeviceExperts, out: Tensor, accumulate: bool, part: slice
) -> None:
    """Tokens of one pass."""
    device, T = experts.device, part.stop - part.start
    programs = programs_of(device, experts.sizes(routing.K))
    moved = [tensors.replicate(x[part], device) for x in (hidden, routing.ids, routing.topk_weights)]
    if accumulate:
        into = tensors.replicate(out[part], device, "TILE")
    else:
        kind = "float32" if out.dtype == torch.float32 else "bfloat16"
        into = tensors.empty((T, experts.H), kind, "TILE", device)
    layer.run(programs, moved[0], moved[1], moved[2], experts, into, T, accumulate)
    out[part] = tensors.to_torch(into, device)


class PreparedTenstorrent(Prepared):
    """See ttnn_moe.prepare: weights are loaded, programs are planned.

    With a placement of D > 1 devices and no rank, it opens a 1xD mesh. Without a placement the devices in use share the
    experts in order. A later change of the weights does not reach it.
    """

    def __init__(self, problem: Problem, experts: Experts, placement: Placement | None):
        if placement is not None and placement.rank is not None and placement.D > 1:
            raise ContractError(
                "one process drives the whole mesh", got=f"a placement with rank {placement.rank}", expected="rank=None"
            )
        super().__init__(problem, experts, placement)
        self._experts = loaded(experts, placement)
        programs_of(self._experts.device, self._experts.sizes(problem.K))

    def _run(self, hidden: Tensor, routing: Routing, out: Tensor, accumulate: bool) -> None:
        if routing.T:
            run(hidden, routing, self._experts, out, accumulate)
