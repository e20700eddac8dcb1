"""What a GPU is, as kernels are chosen by it. The one place that asks CUDA, and the one that tests replace."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        capability: compute capability, e.g. (9, 0).
        multiprocessors: their number.
        shared_memory: bytes that a block may have.
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int


H200 = Gpu((9, 0), 132, 227 << 10)


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU instead of compiling them (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def gpu(device: torch.device) -> Gpu:
    """The GPU that a tensor is on; for the CPU, where Triton's interpreter runs, an H200."""
    return _query(device.index) if device.type == "cuda" else H200


@cache
def _query(index: int) -> Gpu:
    found = torch.cuda.get_device_properties(index)
    return Gpu((found.major, found.minor), found.multi_processor_count, found.shared_memory_per_block_optin)  # type: ignore[attr-defined]
