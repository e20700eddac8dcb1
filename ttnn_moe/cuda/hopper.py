"""Whether a GPU runs the kernels of gpu_kernels/cuda/sm90."""

from __future__ import annotations

from functools import cache

import torch

from . import device as devices
from .jit import build


def why_not(device: torch.device) -> str | None:
    """Why the CUDA C++ kernels for compute capability 9.0 do not run on a device; None: they do."""
    if device.type != "cuda" or devices.gpu(device).capability != (9, 0):
        return "the device is no GPU of compute capability 9.0"
    return _no_compiler()


@cache
def _no_compiler() -> str | None:
    return build.why_not()
