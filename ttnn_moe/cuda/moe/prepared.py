"""A layer made ready: scratch for the largest call, shared by the layers of one problem."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ...backend import Prepared
from ...contract import Experts, Placement, Problem, Routing
from ...sizes import ceil_div
from ..arch import Target, target_of
from ..device import on
from .families import FAMILIES, Chosen
from .family import Buffer, Call
from .run import chosen_for

_ALIGN = 512
_SHARED: weakref.WeakValueDictionary[tuple[object, ...], Workspace] = weakref.WeakValueDictionary()


def bytes_of(scratch: tuple[Buffer, ...]) -> int:
    """Bytes of one block of memory that holds all buffers."""
    return sum(ceil_div(buffer.bytes, _ALIGN) * _ALIGN for buffer in scratch)


def most_bytes(problem: Problem, target: Target) -> int:
    """Bytes that suffice for calls of up to problem.T tokens, whichever family runs them.

    Every family that runs T = 1 counts, since T and alignment decide which one runs. Scratch of a family grows with T.
    """
    able = [family for family in FAMILIES if family.why_not(replace(problem, T=1), target) is None]
    return max(bytes_of(family.scratch(family.plan(problem, target))) for family in able)


class Workspace:
    """Scratch for calls of up to problem.T tokens.

    Layers prepared for one problem share it: their calls must follow one another on one stream, as a model's do.
    """

    def __init__(self, problem: Problem, device: torch.device, sums: bool):
        self._memory = torch.empty(most_bytes(problem, target_of(device)), dtype=torch.uint8, device=device)
        self.buffers = lru_cache(maxsize=1024)(self._buffers)
        # fp32 sums over the D devices, where one GPU runs all of them
        self.sums = torch.empty(problem.T, problem.H, device=device) if sums else None

    def _buffers(self, chosen: Chosen) -> tuple[Tensor, ...]:
        """Views of the memory as a plan's scratch."""
        views, first = [], 0
        for buffer in chosen.scratch:
            views.append(self._memory[first : first + buffer.bytes].view(buffer.dtype).view(buffer.shape))
            first += ceil_div(buffer.bytes, _ALIGN) * _ALIGN
        return tuple(views)

    @classmethod
    def of(cls, problem: Problem, device: torch.device, sums: bool) -> Workspace:
        key = (problem, device, sums)
        found = _SHARED.get(key)
        if found is None:
            found = _SHARED[key] = cls(problem, device, sums)
        return found


class PreparedCuda(Prepared):
    """See ttnn_moe.prepare. With a placement and no rank, one GPU runs the D devices one after the other."""

    def __init__(self, problem: Problem, experts: Experts, placement: Placement | None):
        self.problem = problem
        device = experts.device
        self._parts: list[tuple[Experts, Tensor | None]] = [(experts, None)]
        if placement is not None and placement.D > 1:
            devices = range(placement.D) if placement.rank is None else [placement.rank]
            whole = placement.rank is None
            self._parts = [
                (experts.for_device(placement, d) if whole else experts, placement.local_of(d).to(device))
                for d in devices
            ]
        self._space = Workspace.of(replace(problem, out_dtype=None), device, len(self._parts) > 1)

    def _run(self, hidden: Tensor, routing: Routing, out: Tensor, accumulate: bool) -> None:
        if routing.T == 0:
            return
        into, space = out, self._space
        if space.sums is not None:
            into = space.sums[: routing.T]
            if accumulate or routing.num_tokens is not None:  # rows from num_tokens on stay as they are
                into.copy_(out)
        with on(hidden.device):
            for i, (experts, expert_map) in enumerate(self._parts):
                call = Call(hidden, routing, experts, into, accumulate or i > 0, expert_map)
                chosen = chosen_for(call)
                chosen.family.launch(chosen.plan, call, space.buffers(chosen))
        if into is not out:
            out.copy_(into)
