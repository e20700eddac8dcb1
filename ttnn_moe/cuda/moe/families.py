"""The families in order. The first of a weight format that can, runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...contract import Problem
from ..arch import Target
from .cuda_cpp import CudaCpp
from .family import Buffer, Family
from .few import FEW
from .int4_24_few import INT4_24_FEW
from .int4_24_v6 import INT4_24_V6
from .mxfp4_few import MXFP4_FEW, MXFP4_FEW_BOXES
from .sm80 import SM80
from .sm80_int4_24 import INT4_24
from .sm80_int4_24_fp16 import INT4_24_FP16
from .sm80_mxfp4 import MXFP4
from .sm90 import SM90
from .sm90_int4_24 import INT4_24_SM90
from .sm90_int4_24_few import INT4_24_FEW_SM90
from .sm90_int4_24_fp16 import INT4_24_FP16_SM90
from .sm90_mxfp4 import MXFP4_BOXES_SM90, MXFP4_SM90
from .sm120_mxfp4 import SM120_FP4, SM120_MXFP4
from .triton import TRITON, TRITON_FEW

_MXFP4: tuple[CudaCpp[Any], ...] = (SM120_FP4, SM120_MXFP4, MXFP4_FEW, MXFP4_SM90, MXFP4)
_MXFP4_BOXES: tuple[CudaCpp[Any], ...] = (MXFP4_FEW_BOXES, MXFP4_BOXES_SM90)
_INT4_24_SM90: tuple[CudaCpp[Any], ...] = (INT4_24_FEW_SM90, INT4_24_FP16_SM90, INT4_24_SM90)
_INT4_24: tuple[CudaCpp[Any], ...] = (*_INT4_24_SM90, INT4_24_FEW, INT4_24_FP16, INT4_24, INT4_24_V6)
CUDA_CPP: tuple[CudaCpp[Any], ...] = (FEW, SM90, SM80, *_INT4_24, *_MXFP4, *_MXFP4_BOXES)
FAMILIES: tuple[Family[Any], ...] = (*CUDA_CPP, TRITON_FEW, TRITON)


@dataclass(frozen=True, eq=False)
class Chosen:
    """The family of a problem, its plan and scratch; refused: why each earlier one of the format does not run it."""

    family: Family[Any]
    plan: Any
    scratch: tuple[Buffer, ...]
    refused: dict[str, str]

    def __str__(self) -> str:
        said: dict[str, list[str]] = {}
        for name, reason in self.refused.items():
            said.setdefault(reason, []).append(name)
        chosen = f"{self.family.name} ({self.family.kernels})"
        reasons = (f"{', '.join(names)} do{'es' * (len(names) == 1)} not: {why}" for why, names in said.items())
        return "; ".join((chosen, *reasons))


def choose(
    problem: Problem, target: Target, families: tuple[Family[Any], ...] = FAMILIES, aligned: bool = True
) -> Chosen | str:
    """The first of families that runs a problem, else in words why none does.

    Args:
        aligned: whether weights, hidden and out begin at multiples of 16 bytes.
    """
    refused: dict[str, str] = {}
    able = [family for family in families if family.weight_format == problem.weight_format]
    if not able:
        formats = sorted({family.weight_format for family in families}, reverse=True)
        return f"it runs {' and '.join(formats)} weights, not {problem.weight_format!r}"
    for family in able:
        reason = family.why_not(problem, target)
        if reason is None and not aligned and family.alignment > 1:
            reason = f"a tensor begins at no multiple of {family.alignment} bytes"
        if reason is None:
            plan = family.plan(problem, target)
            return Chosen(family, plan, family.scratch(plan), refused)
        refused[family.name] = reason
    return "; ".join(dict.fromkeys(refused.values()))
