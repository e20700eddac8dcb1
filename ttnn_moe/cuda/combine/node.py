"""Launches of gpu_kernels/cuda/combine/node_{dispatch,combine}.cu: ranks of one node, in each other's memory, no rings.

A dispatch puts each token straight into its row; a combine reads rows where they lie. So rows lie in the heaps. A
rank's heap is in use from its launch until all ranks have ended that call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...contract import Placement
from ...errors import ContractError
from ..jit import load
from .kernel import SHARED_MEMORY, STATUS, RankKernel, RingPlan, aligned, check_topology

_DISPATCH = ("x", "ids", "weights", "T", "owner", "index", "where", "firsts", "rank")
_COMBINE = ("out", "bias_0", "bias_1", "where", "T", "origins", "firsts", "rank")


class _DispatchLocal(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_uint64) for name in _DISPATCH),)


class _CombineLocal(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_uint64) for name in _COMBINE),)


@dataclass(frozen=True)
class NodePlan(RingPlan):
    """See RingPlan: inter is 1, and there are no slots. channels: warps of a block that work."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inter != 1:
            raise ContractError("this kernel serves one node", got=f"inter={self.inter}", expected=1)

    @property
    def roles(self) -> int:
        return 1

    @property
    def W(self) -> int:
        """Warps of a block: as asked, else as many as its shared memory allows, at most 14."""
        most = max(1, min(14, (SHARED_MEMORY - self.fixed_memory) // self.channel_memory)) if self.bulk else 14
        return self.channels or most

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.W * 32

    @property
    def slot(self) -> int:
        return 0

    @property
    def head(self) -> int:
        """Bytes of the heap before the kernel's own part."""
        return aligned(STATUS + self.R * 64 + self.sms * 4)

    def defines(self) -> dict[str, object]:
        found = super().defines()
        del found["R_INTER"]
        return found


@dataclass(frozen=True)
class NodeDispatchPlan(NodePlan):
    """What all ranks of a dispatch in one node agree on.

    Attributes:
        K: experts of a token.
    """

    K: int = 8

    kernel: ClassVar[str] = "node_dispatch"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.K < 1:
            raise ContractError("a token has no expert", got=f"K={self.K}", expected="1 or more")

    @property
    def channel_memory(self) -> int:
        return self.send_rows * self.H * 2

    @property
    def fixed_memory(self) -> int:
        return self.R * -(-self.T // 32) * 8

    @property
    def parts(self) -> tuple[int, ...]:
        """Where the heap's rows, ids, weights and origins begin, and its end; bytes."""
        A = self.R * self.T
        rows = self.head + aligned((self.R + A) * 8)
        ids = rows + aligned(A * self.H * 2)
        weights = ids + aligned(A * self.K * 4)
        origins = weights + aligned(A * self.K * 4)
        return rows, ids, weights, origins, origins + aligned(A * 4)

    @property
    def heap(self) -> int:
        return self.parts[-1]

    def rows(self, heap: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """rows [R*T, H], local ids [R*T, K] int32 (-1: not here) and weights [R*T, K] fp32 of a rank: its heap."""
        A, (rows, ids, weights) = self.R * self.T, self.parts[:3]
        return (
            heap[rows : rows + A * self.H * 2].view(self.dtype).view(A, self.H),
            heap[ids : ids + A * self.K * 4].view(torch.int32).view(A, self.K),
            heap[weights : weights + A * self.K * 4].view(torch.float32).view(A, self.K),
        )

    def origins(self, heap: Tensor) -> Tensor:
        """[R*T] int32 of a rank, in its heap: its row's rank * T + its token."""
        at = self.parts[3]
        return heap[at : at + self.R * self.T * 4].view(torch.int32)


@dataclass(frozen=True)
class NodeCombinePlan(NodePlan):
    """What all ranks of a combine in one node agree on; stages: chunks in flight of a warp, with bulk; 0: what fits."""

    stages: int = 0

    kernel: ClassVar[str] = "node_combine"

    @property
    def chunk(self) -> int:
        """Bytes of a row that a bulk copy takes."""
        return 2048 if self.R <= 2 else 1024 if self.R <= 4 else 512

    @property
    def chunks_in_flight(self) -> int:
        """Stages of bulk copies a warp."""
        return self.stages or min(4, -(-self.H * 2 // self.chunk))

    @property
    def channel_memory(self) -> int:
        return self.chunks_in_flight * self.chunk * self.R

    @property
    def heap(self) -> int:
        return self.head + aligned(self.R * self.T * self.H * 2)

    def rows(self, heap: Tensor) -> Tensor:
        """[R*T, H]: a rank's rows, in its heap, in the order of dispatch's."""
        return heap[self.head : self.head + self.R * self.T * self.H * 2].view(self.dtype).view(-1, self.H)

    def defines(self) -> dict[str, object]:
        more: dict[str, object] = {"CHUNK": self.chunk, "STAGES": self.chunks_in_flight} if self.bulk else {}
        return super().defines() | more


class NodeDispatch(RankKernel[NodeDispatchPlan]):
    """Dispatch of ranks on one GPU; see RankKernel. placement: of the experts on the node's ranks.

    Raises:
        ContractError: placement has another number of ranks. Others: as RankKernel.
    """

    local = _DispatchLocal

    def __init__(
        self,
        plan: NodeDispatchPlan,
        placement: Placement,
        device: int,
        ranks: Sequence[int],
        heaps: Sequence[int],
        timeout: float = 10.0,
    ):
        check_topology(plan, placement)
        super().__init__(plan, device, ranks, heaps, timeout)
        self._call.K, self._call.E = plan.K, placement.E
        tables = torch.stack([placement.device_of, torch.stack([placement.local_of(d) for d in range(plan.R)]).amax(0)])
        self._tables = tables.to(f"cuda:{device}", torch.int32)
        for local in self._call.local[: len(self.ranks)]:
            local.owner, local.index = (table.data_ptr() for table in self._tables)

    def bind(self, n: int, x: Tensor, ids: Tensor, weights: Tensor, T: Tensor, where: Tensor, firsts: Tensor) -> None:
        """Tensors of the n-th rank here, for the launches that follow.

        Args:
            x: [T, H]. ids: [T, K] int32. weights: [T, K] fp32. T: [1] int32, tokens; more than the plan's count as
                that many.
            where: [R, T of the plan] int32, gets the row of each token at each rank, or -1. firsts: [R + 1] int32,
                gets where the rows of each rank's tokens begin here, and the number of all rows.
        """
        local = self._call.local[n]
        for name, tensor in zip(_DISPATCH, (x, ids, weights, T), strict=False):
            setattr(local, name, tensor.data_ptr())
        local.where, local.firsts = where.data_ptr(), firsts.data_ptr()


class NodeCombine(RankKernel[NodeCombinePlan]):
    """Combine of ranks on one GPU; see RankKernel. What it sums is plan.rows of the ranks' heaps."""

    local = _CombineLocal

    def bind(
        self,
        n: int,
        where: Tensor,
        origins: Tensor,
        firsts: Tensor,
        T: Tensor,
        out: Tensor,
        bias_0: Tensor | None = None,
        bias_1: Tensor | None = None,
    ) -> None:
        """Tensors of the n-th rank here, for the launches that follow. out: [T, H]. Others: as NodeDispatch's."""
        local = self._call.local[n]
        for name, tensor in zip(_COMBINE, (out, bias_0, bias_1, where, T, origins, firsts), strict=False):
            setattr(local, name, load.pointer(tensor))


def rows_at(masks: Sequence[Tensor], T: int, rank: int) -> Tensor:
    """[R, T] int32: the row of each token of a rank in each rank's rows, or -1: from the masks of every rank."""
    R, own = len(masks), masks[rank]
    out = torch.full((R, T), -1, dtype=torch.int32, device=own.device)
    for r in range(R):
        has = own >> r & 1
        before = sum(int((mask >> r & 1).sum()) for mask in masks[:rank])
        out[r, : len(own)] = torch.where(has.bool(), has.cumsum(0) - 1 + before, -1).int()
    return out


def origins_at(masks: Sequence[Tensor], T: int, rank: int) -> tuple[Tensor, Tensor]:
    """[R*T] int32, where a rank's rows come from, and [R + 1] int32, where those of each rank begin: from all masks."""
    here = [c * T + torch.nonzero(mask >> rank & 1).flatten() for c, mask in enumerate(masks)]
    found, counts = torch.cat(here).int(), torch.tensor([0, *map(len, here)])
    out = torch.full((len(masks) * T,), -1, dtype=torch.int32, device=found.device)
    out[: len(found)] = found
    return out, counts.cumsum(0).int().to(found.device)
