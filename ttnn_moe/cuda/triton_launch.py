"""What every launch of a Triton kernel needs: whether Triton serves, programmatic dependent launch, precision."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from . import device as devices
from .arch import stands_for


@dataclass(frozen=True)
class Tile:
    """Constants, warps and pipeline stages of a kernel's launch. A kernel with a constant STAGES ignores stages."""

    constants: dict[str, int]
    warps: int
    stages: int = 3


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why Triton takes no tensor of this device and dtype; None: it does."""
    if device.type == "cuda":
        if devices.gpu(device).capability < (8, 0):
            return "the GPU is older than compute capability 8.0"
    elif not devices.interpreted():
        return "the tensor is not on a CUDA device"
    elif dtype == torch.bfloat16:
        return "Triton's interpreter has no bf16 products"
    return None if _has_triton() else "triton is not installed"


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


_PDL = {"PDL": True, "launch_pdl": True}
_NO_PDL = {"PDL": False}


def pdl(device: torch.device) -> dict[str, bool]:
    """Options of a launch: programmatic dependent launch where the GPU has it."""
    here = stands_for(devices.gpu(device)) if device.type == "cuda" else None
    return _PDL if here is not None and here.capability >= (9, 0) else _NO_PDL


def precision(x: Tensor) -> str:
    """input_precision of tl.dot: fp32 inputs get exact fp32 products."""
    return "ieee" if x.dtype == torch.float32 else "tf32"
