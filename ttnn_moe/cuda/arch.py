"""What kernels are chosen for: a GPU, and the architecture that NVRTC compiles for.

TTNN_MOE_CUDA_ARCH names an older architecture. The GPU then runs the kernels and sizes of that one, from PTX.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..errors import ContractError
from .device import Gpu, gpu, interpreted
from .jit import build

ENV = "TTNN_MOE_CUDA_ARCH"


@dataclass(frozen=True)
class Arch:
    """One target of the compiler.

    Attributes:
        name: as NVRTC writes it: "sm_80" is machine code, "compute_80" is PTX, which the driver compiles.
        products: folder under gpu_kernels/cuda that holds its grouped product: "sm80" or "sm90".
        shared_memory: bytes that a block may have.
    """

    name: str
    products: str
    shared_memory: int

    @cached_property
    def overlaps(self) -> bool:
        """Whether kernels start before their predecessor ends (programmatic dependent launch), and wait for it."""
        return int(self.name.partition("_")[2].rstrip("af")) >= 90

    def holds(self, blocks: int, shared_memory: int) -> bool:
        """Whether a multiprocessor has room for so many blocks of so many bytes each.

        It has 1 KiB more than a block may have, and takes 1 KiB for each block.
        """
        return blocks * (shared_memory + 1024) <= self.shared_memory + 1024


HOPPER = Arch("sm_90a", "sm90", 227 << 10)
_BLACKWELL = Arch("sm_120f", "sm80", 99 << 10)

# by compute capability
ARCHES: dict[tuple[int, int], Arch] = {
    (8, 0): Arch("sm_80", "sm80", 163 << 10),
    (8, 6): Arch("sm_86", "sm80", 99 << 10),
    (8, 7): Arch("sm_87", "sm80", 163 << 10),
    (8, 9): Arch("sm_89", "sm80", 99 << 10),
    (9, 0): HOPPER,
    (12, 0): _BLACKWELL,
    (12, 1): _BLACKWELL,
}


def asked() -> str | None:
    """The architecture that TTNN_MOE_CUDA_ARCH names, or None."""
    return os.environ.get(ENV) or None


def named(name: str) -> Arch:
    """An architecture by its name.

    Raises:
        ContractError: no such name.
    """
    for arch in ARCHES.values():
        if arch.name == name:
            return arch
    names = sorted({arch.name for arch in ARCHES.values()})
    raise ContractError("there are no kernels for this architecture", got=repr(name), expected=f"one of {names}")


def find(here: Gpu, name: str | None = None) -> Arch | None:
    """The architecture that a GPU runs; None if there are no kernels for the GPU.

    Args:
        name: an older architecture, from sm_80 to sm_89, whose kernels and sizes the GPU runs from PTX.

    Raises:
        ContractError: no such name, or the GPU does not run that code.
    """
    own = ARCHES.get(here.capability)
    if name is None or (own is not None and own.name == name):
        return own
    for of, arch in ARCHES.items():
        if arch.name == name and of[0] == 8 and of <= here.capability:
            room = min(arch.shared_memory, here.shared_memory)
            return Arch(name.replace("sm_", "compute_"), arch.products, room)
    able = [arch.name for of, arch in ARCHES.items() if arch is own or (of[0] == 8 and of <= here.capability)]
    raise ContractError(
        f"{ENV} names no architecture whose code this GPU runs",
        got=repr(name),
        expected=f"one of {list(dict.fromkeys(able))} on compute capability {here.capability[0]}.{here.capability[1]}",
        remedy=f"unset {ENV}: the GPU's own is the default",
    )


def stands_for(here: Gpu) -> Gpu:
    """The GPU that kernels are chosen for: this one, or one of the architecture that TTNN_MOE_CUDA_ARCH names.

    Raises:
        ContractError: TTNN_MOE_CUDA_ARCH names what the GPU does not run.
    """
    arch = find(here, name) if (name := asked()) is not None else None
    if arch is None or ARCHES.get(here.capability) == arch:
        return here
    capability = next(capability for capability, arch in ARCHES.items() if arch.name == name)
    return replace(here, capability=capability, shared_memory=arch.shared_memory)


def has_warpgroups(device: torch.device) -> bool:
    """Whether the tensor cores multiply for warpgroups (wgmma), as on Hopper, or for warps."""
    return stands_for(gpu(device)).capability[0] == 9


def why_not_hopper(device: torch.device) -> str | None:
    """Why the kernels of gpu_kernels/cuda/sm90 do not run on a device; None: they do."""
    if device.type != "cuda" or gpu(device).capability != (9, 0):
        return "the device is no GPU of compute capability 9.0"
    if stands_for(gpu(device)).capability != (9, 0):
        return f"{ENV} asks for {asked()}"
    return build.why_not()


def why_not_words(dtype: torch.dtype, *tensors: Tensor) -> str | None:
    """Why kernels that copy 16 bytes of this dtype at a time do not take these tensors; None: they do."""
    for t in tensors:
        if t.dtype != dtype or not t.is_contiguous() or t.data_ptr() % 16:
            return "a tensor of another dtype, not contiguous, or not aligned to 16 bytes"
    return None


@dataclass(frozen=True)
class Target:
    """What kernels are chosen for.

    Attributes:
        gpu: the GPU that runs them, or that it stands for.
        arch: what CUDA C++ is compiled for; None: nothing.
        reason: why arch is None.
    """

    gpu: Gpu
    arch: Arch | None
    reason: str | None = None


def target_of(device: torch.device | None = None) -> Target:
    """The target of a device; None: the current GPU, or Triton's interpreter.

    Raises:
        ContractError: TTNN_MOE_CUDA_ARCH names what the GPU does not run.
    """
    here = gpu(device)
    if interpreted():
        return Target(here, None, "Triton's interpreter runs Triton kernels alone")
    arch, here = find(here, asked()), stands_for(here)
    if arch is None:
        major, minor = here.capability
        return Target(here, None, f"its code is for compute capability 8.x, 9.0 and 12.x, not {major}.{minor}")
    reason = build.why_not()
    return Target(here, None if reason else arch, reason)
