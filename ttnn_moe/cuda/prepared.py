"""A layer made ready: buffers for the largest call, shared by the layers of one problem."""

from __future__ import annotations

import weakref
from dataclasses import replace

import torch
from torch import Tensor

from ..backend import Prepared
from ..contract import Experts, Placement, Problem, Routing
from . import launch
from .run import Buffers, most_words, plan_for, run

_SHARED: weakref.WeakValueDictionary[tuple[object, ...], Workspace] = weakref.WeakValueDictionary()


class Workspace:
    """Scratch for calls of up to problem.T tokens.

    Layers prepared for one problem share it: their calls must follow one another on one stream, as a model's do.
    """

    def __init__(self, problem: Problem, device: torch.device, sums: bool):
        T, E, K, H, I = problem.T, problem.E, problem.K, problem.H, problem.I
        pairs = T * K
        self.buffers = Buffers(
            torch.empty(pairs, I, dtype=problem.dtype, device=device),
            torch.empty(pairs, H, dtype=problem.dtype, device=device),
            torch.empty(most_words(T, E, K), dtype=torch.int32, device=device),
        )
        # of a mesh that one GPU stands for: fp32 sums over its devices
        self.sums = torch.empty(problem.T, problem.H, device=device) if sums else None

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
        into = out
        if self._space.sums is not None:
            into = self._space.sums[: routing.T]
            if accumulate or routing.num_tokens is not None:  # rows from num_tokens on stay as they are
                into.copy_(out)
        for i, (experts, expert_map) in enumerate(self._parts):
            plan = plan_for(routing.T, routing.E, routing.K, experts, hidden, into)
            selection = launch.Selection.of(routing, expert_map)
            run(hidden, selection, experts, into, accumulate or i > 0, plan, self._space.buffers)
        if into is not out:
            out.copy_(into)
