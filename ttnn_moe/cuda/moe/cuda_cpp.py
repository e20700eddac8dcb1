"""What the families of CUDA C++ kernels have in common: limits, and launches that are bound once."""

from __future__ import annotations

from abc import abstractmethod
from functools import lru_cache
from typing import Any

import torch

from ...contract import Problem
from ...sizes import ceil_div
from ..arch import Arch, Target
from ..jit.load import Launch
from . import sort
from .family import Call, Family, P
from .uses import Use

MAX_E, MAX_K = 1024, 16
_CODE = {"sm80": "compute capability 8.x and 12.x", "sm90": "sm_90a"}


class CudaCpp(Family[P]):
    """A family whose kernels NVRTC compiles. P: its plan."""

    alignment = 16
    weight_format = "dense"

    @abstractmethod
    def uses(self, plan: P, ids64: bool, add: bool) -> tuple[Use, ...]:
        """The kernels of a call in the order of their launch. ids64: int64 ids; add: out is added to."""

    @abstractmethod
    def bind(self, plan: P, uses: tuple[Use, ...], device: int) -> tuple[Launch, ...]:
        """The launches of these kernels, with everything but addresses."""


@lru_cache(maxsize=4096)
def launches(family: CudaCpp[P], plan: P, ids64: bool, add: bool, device: int) -> tuple[Launch, ...]:
    """The launches of a call, cached: Python takes longer to make them than to use them. Plans hash by identity."""
    return family.bind(plan, family.uses(plan, ids64, add), device)


def launches_of(family: CudaCpp[P], plan: P, call: Call) -> tuple[Launch, ...]:
    """The bound launches of a call; kept for calls of the same plan, dtype of ids, device and `accumulate`."""
    device: Any = call.hidden.device.index
    return launches(family, plan, call.routing.topk_ids.dtype == torch.int64, call.accumulate, device)


def dense_limits(problem: Problem, target: Target) -> str | None:
    """Why the kernels of dense weights do not run a problem, or None. One limit for few and many tokens."""
    return limits(problem, target, "dense", (torch.bfloat16, torch.float16))


def limits(
    problem: Problem,
    target: Target,
    weight_format: str,
    dtypes: tuple[torch.dtype, ...],
    *,
    multiple: int = 64,
    silu_only: bool = True,
) -> str | None:
    """Why kernels of these weights, which multiply these dtypes, do not run a problem, or None.

    Args:
        multiple: of which H and I have to be.
        silu_only: the kernels compute silu(gate) * up, without biases; else every activation, with biases too.
    """
    arch = target.arch
    if arch is None:
        return target.reason
    if problem.weight_format != weight_format:
        return f"it runs {weight_format} weights, not {problem.weight_format!r}"
    if problem.dtype not in dtypes:
        names = " and ".join("bf16" if dtype == torch.bfloat16 else "fp16" for dtype in dtypes)
        return f"it multiplies {names}, not {str(problem.dtype)[6:]}"
    if silu_only and (reason := problem.beyond_silu()) is not None:
        return reason
    if problem.H % multiple or problem.I % multiple:
        return f"H and I have to be multiples of {multiple}, not {problem.H} and {problem.I}"
    if problem.E > MAX_E or problem.K > MAX_K:
        return f"it runs up to {MAX_E} experts and K up to {MAX_K}, not E={problem.E}, K={problem.K}"
    if (reason := sort.why_not(problem.E, arch)) is not None:
        return reason
    # some kernels pad rows to units of 128
    if problem.T * max(ceil_div(problem.H, 128), problem.K * ceil_div(problem.I, 128)) * 128 >= 1 << 35:
        return f"it addresses up to 2^35 elements of hidden or activations, not those of T={problem.T}"
    return None


def why_not_products(target: Target, folder: str) -> str | None:
    """Why the products of a folder of gpu_kernels/cuda do not run on a target, or None. folder: see Arch.products."""
    if target.arch is None or target.arch.products == folder:
        return None
    return f"its code is for {_CODE[folder]}, not {target.arch.name}"


def arch_of(target: Target) -> Arch:
    """The architecture of a target that `why_not` accepted."""
    assert target.arch is not None
    return target.arch
