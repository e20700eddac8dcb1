"""A layer made ready: scratch for the largest call on each stream, shared by the layers of one problem."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import replace
from functools import lru_cache, partial
from threading import Lock

import torch
from torch import Tensor

from ...accelerator import on
from ...backend import Prepared
from ...contract import Experts, Placement, Problem, Routing
from ...sizes import ceil_div
from ..arch import Target, target_of
from .families import FAMILIES, Chosen
from .family import Buffer, Call
from .run import chosen_for
from .warmup import compile_up_to

_ALIGN = 512
_SHARED: weakref.WeakValueDictionary[tuple[object, ...], Workspace] = weakref.WeakValueDictionary()
_MAKING = Lock()


def bytes_of(scratch: tuple[Buffer, ...]) -> int:
    """Bytes of one block of memory that holds all buffers."""
    return sum(ceil_div(buffer.bytes, _ALIGN) * _ALIGN for buffer in scratch)


def most_bytes(problem: Problem, target: Target) -> int:
    """Bytes that suffice for calls of up to problem.T tokens, whichever family runs them.

    Every family that runs one token or problem.T counts, since T and alignment decide which one runs. Scratch of a
    family grows with T.
    """
    ends = (replace(problem, T=1), problem)
    able = [family for family in FAMILIES if any(family.why_not(end, target) is None for end in ends)]
    return max(bytes_of(family.scratch(family.plan(problem, target))) for family in able)


def _views(memory: Tensor, chosen: Chosen) -> tuple[Tensor, ...]:
    """A plan's scratch, in one block of memory."""
    views, first = [], 0
    for buffer in chosen.scratch:
        views.append(memory[first : first + buffer.bytes].view(buffer.dtype).view(buffer.shape))
        first += ceil_div(buffer.bytes, _ALIGN) * _ALIGN
    return tuple(views)


class Scratch:
    """Scratch for calls of up to problem.T tokens that follow one another on one stream.

    Attributes:
        buffers: a plan's scratch, as views of one block of memory.
        sums: [T, H] fp32 sums over the D devices, where one GPU runs all of them.
    """

    def __init__(self, problem: Problem, device: torch.device, sums: bool):
        # a stream's first call may be under inference_mode, and a later one outside
        with torch.inference_mode(False), torch.no_grad():
            self._memory = torch.empty(most_bytes(problem, target_of(device)), dtype=torch.uint8, device=device)
            shape = problem.T, problem.H
            self.sums = torch.empty(shape, dtype=torch.float32, device=device) if sums else None
        # no bound method: it would hold this object, and so the memory, until a garbage collection
        self.buffers = lru_cache(maxsize=1024)(partial(_views, self._memory))


class Workspace:
    """Scratch for each stream, made at a stream's first call. Layers prepared for one problem share it.

    Args:
        in_turn: an owner whose calls follow one another, whatever their streams: one scratch serves all of them.
            False: there is none.

    Attributes:
        turn: hold it from the first to the last launch of a call. Then threads may share a stream.
    """

    def __init__(self, problem: Problem, device: torch.device, sums: bool, in_turn: Hashable = False):
        self.turn = Lock()
        self._make = lambda: Scratch(problem, device, sums)
        self._index = device.index if device.type == "cuda" and not in_turn else None
        self._of_stream: dict[int, Scratch] = {}

    def scratch(self) -> Scratch:
        """That of the current stream. A captured graph uses that of the stream that captured it."""
        stream = 0 if self._index is None else torch._C._cuda_getCurrentRawStream(self._index)
        found = self._of_stream.get(stream)
        if found is None:
            found = self._of_stream[stream] = self._make()
        return found

    @classmethod
    def of(cls, problem: Problem, device: torch.device, sums: bool, in_turn: Hashable = False) -> Workspace:
        key = (problem, device, sums, in_turn)
        with _MAKING:
            found = _SHARED.get(key)
            if found is None:
                found = _SHARED[key] = cls(*key)
        with found.turn:
            found.scratch()
        return found


class PreparedCuda(Prepared):
    """See ttnn_moe.prepare. With a placement and no rank, one GPU runs the D devices one after the other.

    in_turn: see Workspace.
    """

    def __init__(self, problem: Problem, experts: Experts, placement: Placement | None, in_turn: Hashable = False):
        super().__init__(problem, experts, placement)
        device = experts.device
        self._parts: list[tuple[Experts, Tensor | None]] = [(experts, None)]
        if placement is not None and (placement.D > 1 or placement.rank is not None):
            devices = range(placement.D) if placement.rank is None else [placement.rank]
            whole = placement.rank is None
            self._parts = [
                (experts.for_device(placement, d) if whole else experts, placement.local_of(d).to(device))
                for d in devices
            ]
        self._space = Workspace.of(replace(problem, out_dtype=None), device, len(self._parts) > 1, in_turn)

    def compile(self, least: int = 1, *, ids64: bool = False, accumulate: bool = False) -> int:
        return compile_up_to(self.problem, target_of(self.device), least, ids64, accumulate)

    def _run(self, hidden: Tensor, routing: Routing, out: Tensor, accumulate: bool) -> None:
        if routing.T == 0:
            return
        with on(hidden.device), self._space.turn:
            into, scratch = out, self._space.scratch()
            if scratch.sums is not None:
                into = scratch.sums[: routing.T]
                if accumulate or routing.num_tokens is not None:  # rows from num_tokens on stay as they are
                    into.copy_(out)
            for i, (experts, expert_map) in enumerate(self._parts):
                call = Call(hidden, routing, experts, into, accumulate or i > 0, expert_map)
                chosen = chosen_for(call)
                chosen.family.launch(chosen.plan, call, scratch.buffers(chosen))
            if into is not out:
                out.copy_(into)
