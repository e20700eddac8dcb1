"""Triton's kernels for an older architecture, on a GPU that TTNN_MOE_CUDA_ARCH lets stand for it."""

from __future__ import annotations

import os

import torch


def compile_for(capability: tuple[int, int]) -> None:
    """Have Triton make PTX for a compute capability. ptxas then makes this GPU's code of the PTX.

    Call it before the first Triton kernel of the process.
    """
    from triton.backends.nvidia.compiler import CUDABackend

    name = f"sm{capability[0]}{capability[1]}"
    if os.environ.get("TRITON_OVERRIDE_ARCH") == name:
        return
    os.environ["TRITON_OVERRIDE_ARCH"] = name
    make = CUDABackend.make_cubin
    major, minor = torch.cuda.get_device_capability()
    here = 10 * major + minor
    CUDABackend.make_cubin = lambda self, src, metadata, opt, capability: make(self, src, metadata, opt, here)
