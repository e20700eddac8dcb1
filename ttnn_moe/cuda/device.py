"""What the choice of kernels needs to know of a GPU. No other module asks CUDA. Tests replace `query`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cache

import torch


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        capability: compute capability, e.g. (9, 0).
        multiprocessors: their number.
        shared_memory: bytes that a block may have.
        name: as the driver calls it; two GPUs that differ in nothing else are equal.
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int
    name: str = field(default="a GPU", compare=False)

    @property
    def sm(self) -> str:
        """Its architecture as compilers write it: sm_90."""
        return f"sm_{self.capability[0]}{self.capability[1]}"


H200 = Gpu((9, 0), 132, 227 << 10, "NVIDIA H200")


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU instead of compiling them (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def gpu(device: torch.device | int | None = None) -> Gpu:
    """The GPU of a device or an index; None: the current one. Where Triton interprets on the CPU: an H200."""
    return query(device)


def gpus() -> list[Gpu]:
    """All GPUs of this machine."""
    return [gpu(index) for index in range(torch.cuda.device_count())]


def query(device: torch.device | int | None) -> Gpu:
    """See gpu."""
    if isinstance(device, torch.device):
        if device.type != "cuda":
            return H200
        device = device.index
    elif device is None and interpreted():
        return H200
    return _properties(torch.cuda.current_device() if device is None else device)


@cache
def _properties(index: int) -> Gpu:
    found = torch.cuda.get_device_properties(index)
    return Gpu(
        (found.major, found.minor),
        found.multi_processor_count,
        found.shared_memory_per_block_optin,  # type: ignore[attr-defined]  # torch's stubs lack it
        found.name,
    )
