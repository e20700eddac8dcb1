"""The sizes of a layer on one device, and the planner's programs for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..contract import Problem
from .weight_formats import ComputeConfig, ExpertFormats

if TYPE_CHECKING:
    from .._planner import Machine, Program


@dataclass(frozen=True)
class Sizes:
    """Sizes that a plan depends on, besides T. E_local and I are those of a device; formats as ExpertFormats.parse."""

    E: int
    E_local: int
    K: int
    H: int
    I: int
    weight_format: str = "bfloat16"
    compute: ComputeConfig = ComputeConfig()

    @classmethod
    def of(cls, problem: Problem, weight_format: str = "bfloat16") -> Sizes:
        return cls(problem.E, problem.E // problem.D, problem.K, problem.H, problem.I, weight_format)

    @property
    def formats(self) -> ExpertFormats:
        """Formats of gate and up, and of down."""
        return ExpertFormats.parse(self.weight_format)


def planned(sizes: Sizes, bound: int, name: str = "gate_up", out_format: str = "bfloat16") -> Any:
    """The planner's problem of a step for calls of up to `bound` tokens."""
    from .._planner import Problem as Planned

    s = sizes
    return Planned(
        T=bound,
        E=s.E,
        E_local=s.E_local,
        K=s.K,
        H=s.H,
        I=s.I,
        weight_format=s.formats.down if name == "down" else s.formats.gate_up,
        out_format=out_format,
        math_fidelity=s.compute.math_fidelity or "",
        fp32_dest=s.compute.fp32_dest_acc_en,
        banked=s.formats.banked,
    )


def plan(sizes: Sizes, machine: Machine, name: str, bound: int, out_format: str = "bfloat16") -> Program:
    """See LayerPrograms.plan."""
    from .. import _planner

    problem = planned(sizes, bound, name, out_format)
    if name in ("gate_up", "project"):
        return _planner.plan_gate_up(problem, machine, 2 if name == "gate_up" else 1)
    return getattr(_planner, f"plan_{name}")(problem, machine)


def plan_layer(sizes: Sizes, machine: Machine, bound: int) -> None:
    """Plan all that a layer runs for calls of up to `bound` tokens. Raises ValueError if there is no such program."""
    for name in ("routing", "gate_up", "down"):
        plan(sizes, machine, name, bound, "float32")
