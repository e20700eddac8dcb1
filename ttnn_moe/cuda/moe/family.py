"""A family of kernels: whether it runs a problem, with which plan and scratch; and its launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ...backend import Numerics
from ...contract import Experts, Problem, Routing
from ..arch import Target
from ..jit import load


@dataclass(slots=True, eq=False)
class Call:
    """One call, checked by the contract.

    Attributes:
        hidden: [T, H], contiguous. out: [T, H], to write to, or with accumulate to add to.
        routing: ids name routing.E experts. experts: those of this device.
        expert_map: [routing.E] int32, the local index of each expert or -1; None: experts holds all of them.
    """

    hidden: Tensor
    routing: Routing
    experts: Experts
    out: Tensor
    accumulate: bool
    expert_map: Tensor | None = None

    @property
    def route(self) -> tuple[int, int, int]:
        """Addresses of ids, expert_map and num_tokens; 0: there is none."""
        routing = self.routing
        return routing.topk_ids.data_ptr(), load.pointer(self.expert_map), load.pointer(routing.num_tokens)


@dataclass(frozen=True)
class Buffer:
    """Scratch of a call: uninitialised, contiguous, at a multiple of 16 bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


P = TypeVar("P")


class Family(Protocol[P]):
    """A set of kernels for the whole operator, in one form. P: its plan.

    Attributes:
        name: as in families.FAMILIES and in `ttnn-moe why`.
        kernels: what runs, in words.
        weight_format: of the experts that it runs.
        alignment: weights, hidden and out must begin at a multiple of so many bytes. A later family runs other calls.
        rounds_expert_out: whether each expert's output is rounded to the dtype of hidden before it is weighted.
        operands: format of hidden and activations in both products, as in backend.Numerics; None: the dtype of hidden.
    """

    name: str
    kernels: str
    weight_format: str
    alignment: int
    rounds_expert_out: bool
    operands: str | None = None

    def why_not(self, problem: Problem, target: Target) -> str | None:
        """Why this family does not run a problem, or None."""

    def plan(self, problem: Problem, target: Target) -> P:
        """Kernels and sizes for a problem: a pure function."""

    def scratch(self, plan: P) -> tuple[Buffer, ...]:
        """Buffers that `launch` takes. A prepared layer relies on this: no smaller T needs more bytes."""

    def launch(self, plan: P, call: Call, buffers: tuple[Tensor, ...]) -> None:
        """Launch on the current stream of the current GPU; call.routing.T is plan's T, above 0."""


def numerics_of(family: Family[Any], problem: Problem) -> Numerics:
    """Where a family rounds, of hidden in bf16 or fp16."""
    return Numerics(
        activation=None if family.operands else problem.dtype,
        expert_out=problem.dtype if family.rounds_expert_out else None,
        operands=family.operands,
    )
