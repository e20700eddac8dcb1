"""The backends that run every edge of the contract: one joins by one line in TARGETS."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Target:
    """A backend to run the cases on: its device, dtypes and row alignment of the step tensors."""

    backend: str
    device: str = "cpu"
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    row_align: int = 1

    def __str__(self) -> str:
        return self.backend


# the cuda backend's kernels run on the CPU then: see tests/cuda/test_cuda_kernels.py
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

TARGETS = [
    Target("reference", dtypes=(torch.bfloat16, torch.float16, torch.float32)),
    Target("tenstorrent", dtypes=(torch.bfloat16,), row_align=32),
    Target("cuda", "cpu" if INTERPRETED else "cuda", (torch.bfloat16, torch.float16, torch.float32)),
    Target("ascend", "npu"),
]
