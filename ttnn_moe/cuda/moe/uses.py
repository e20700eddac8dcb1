"""A CUDA C++ kernel as a plan uses it, its launch, and the pointers of a call."""

from __future__ import annotations

from ctypes import c_int32
from dataclasses import dataclass

import torch
from torch import Tensor

from ...contract import Experts
from ..arch import Arch
from ..device import gpu
from ..jit import load
from ..jit.spec import Spec


@dataclass(frozen=True)
class Use:
    """A kernel, and how it is launched.

    Attributes:
        shared_memory: bytes of dynamic memory of a block. carveout: see load.kernel.
        overlap: whether it may start before its predecessor has ended.
    """

    spec: Spec
    shared_memory: int = 0
    overlap: bool = True
    carveout: int | None = None

    @classmethod
    def of(cls, arch: Arch, name: str, shared_memory: int = 0, **defines: object) -> Use:
        return cls(Spec.of(name, arch.name, **defines), shared_memory, arch.overlaps)

    def bind(self, device: int, grid: tuple[int, ...], block: int, *last: int, cluster: int = 1) -> load.Launch:
        """Its launch; last: int arguments that follow a call's addresses."""
        return load.Launch(
            self.spec,
            device,
            grid,
            block,
            *map(c_int32, last),
            shared_memory=self.shared_memory,
            carveout=self.carveout,
            cluster=cluster,
            overlap=self.overlap,
        )

    def bind_resident(self, arch: Arch, device: int, threads: int, *last: int) -> load.Launch:
        """Its launch by as many blocks as a GPU holds at a time."""
        return self.bind(device, (self.resident_blocks(arch, device, threads),), threads, *last)

    def resident_blocks(self, arch: Arch, device: int, threads: int) -> int:
        """Blocks that a GPU holds at a time; no more than multiprocessors of `arch` hold, which keep 1 KiB a block."""
        most = ((arch.shared_memory + 1024) // (self.shared_memory + 1024)) * gpu(device).multiprocessors
        return min(load.resident_blocks(self.spec, device, threads, self.shared_memory), most)


def gate_up_rows(order: str, I: int) -> tuple[int, int]:
    """Rows from one gate row to the next, and from a gate row to its up row."""
    return (2, 1) if order == "interleaved" else (1, I)


def halves(experts: Experts) -> tuple[int, int]:
    """Addresses of the first gate row and the first up row."""
    weight, (_, rows) = experts.tensors["gate_up"], gate_up_rows(experts.gate_up_order, experts.I)
    return weight.data_ptr(), weight.data_ptr() + rows * experts.H * weight.element_size()


def row_steps(order: str, H: int, I: int) -> tuple[int, int]:
    """Rows of an expert in gate_up, and elements from one gate (or up) row to the next."""
    return (I, 2 * H) if order == "interleaved" else (2 * I, H)


def bias_pointers(bias: Tensor | None) -> tuple[int, int]:
    """Address of a bias in bf16, and of one in fp32; 0: it is the other, or there is none."""
    at = load.pointer(bias)
    return (0, at) if bias is not None and bias.dtype == torch.float32 else (at, 0)
