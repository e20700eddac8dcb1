"""Launches of gpu_kernels/cuda/combine/rank_combine.cu: one or more ranks on one GPU, peers wherever they are."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...contract import or_float32
from ...errors import ContractError
from ..jit import load
from .kernel import RankKernel, RingPlan, Stopped, stopped

__all__ = ["Plan", "RankCombine", "Stopped", "pointers", "stopped"]


class _Local(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_uint64) for name in ("x", "out", "bias_0", "bias_1", "masks", "rows", "T", "rank")),)


@dataclass(frozen=True)
class Plan(RingPlan):
    """What all ranks of a combine agree on; see RingPlan.

    Attributes:
        dtype: of x and out. wire: dtype, or float32; with bulk, dtype.
        columns, stages: vectors of 8 that a lane adds at a time, chunks in flight of a channel; 0: what fits.
    """

    wire: torch.dtype = torch.bfloat16
    columns: int = 0
    stages: int = 0

    kernel: ClassVar[str] = "rank_combine"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wire not in (self.dtype, torch.float32):
            raise ContractError("unsupported wire dtype", got=self.wire, expected=or_float32(self.dtype))
        if self.bulk and self.wire is not self.dtype:
            raise ContractError(
                "bulk copies convert nothing", got=f"wire {self.wire}", expected=f"{self.dtype}", remedy="bulk=False"
            )

    @property
    def roles(self) -> int:
        """Warps of a channel: a receiver; a sender and a forwarder where the topology has work for them."""
        return 1 + (self.intra > 1) + (self.inter > 1)

    @property
    def chunk(self) -> int:
        """Bytes of a row that a bulk copy takes."""
        sources = self.intra + self.inter - 1
        return 2048 if sources <= 2 else 1024 if sources <= 4 else 512

    @property
    def chunks_in_flight(self) -> int:
        """Stages of bulk copies a warp."""
        return self.stages or min(4, -(-self.H * 2 // self.chunk))

    @property
    def channel_memory(self) -> int:
        """Rows of its sender, the stages of its receiver and forwarder."""
        summed = self.intra + self.inter - 1 + (self.intra if self.inter > 1 else 0)
        return (self.send_rows * self.H * 2 if self.intra > 1 else 0) + self.chunks_in_flight * self.chunk * summed

    @property
    def slot(self) -> int:
        return self.H * self.wire.itemsize

    def defines(self) -> dict[str, object]:
        found = super().defines() | {"WIRE32": self.wire is torch.float32}
        if self.columns:
            found["COLUMNS"] = self.columns
        if self.bulk:
            found |= {"CHUNK": self.chunk, "STAGES": self.chunks_in_flight}
        return found


class RankCombine(RankKernel[Plan]):
    """Combine of ranks on one GPU; see RankKernel."""

    local = _Local

    def bind(
        self,
        n: int,
        x: Tensor,
        masks: Tensor,
        rows: Tensor,
        T: Tensor,
        out: Tensor,
        bias_0: Tensor | None = None,
        bias_1: Tensor | None = None,
    ) -> None:
        """Tensors of the n-th rank here, for the launches that follow; shapes as the kernel's table."""
        local = self._call.local[n]
        local.x, local.out, local.masks, local.rows, local.T = (t.data_ptr() for t in (x, out, masks, rows, T))
        local.bias_0, local.bias_1 = map(load.pointer, (bias_0, bias_1))


def pointers(masks: Sequence[Tensor], T: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """masks [R, T] int64, rows [R, T] int32 and T [R] int32 of a rank, from the masks of every rank.

    A row's number counts the rank's rows in ascending rank, then token; -1: the rank has none.
    """
    R, device = len(masks), masks[0].device
    all_masks = torch.zeros(R, T, dtype=torch.int64, device=device)
    for c, mask in enumerate(masks):
        all_masks[c, : len(mask)] = mask
    here = all_masks >> rank & 1
    rows = torch.where(here.bool(), here.flatten().cumsum(0).view(R, T) - 1, -1).int()
    return all_masks, rows, torch.tensor([len(mask) for mask in masks], dtype=torch.int32, device=device)
