"""Launches of gpu_kernels/cuda/combine/rank_dispatch.cu: one or more ranks on one GPU, peers wherever they are."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...contract import Placement
from ...errors import ContractError
from .kernel import RankKernel, RingPlan, aligned, check_topology

_INPUTS = ("x", "ids", "weights", "T")
_OUTPUTS = ("rows", "ids", "weights", "masks", "row_of", "tokens", "A")


class _Local(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in (*_INPUTS, "owner", "local_of")),
        *((f"out_{name}", ctypes.c_uint64) for name in _OUTPUTS),
        ("rank", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class DispatchPlan(RingPlan):
    """What all ranks of a dispatch agree on; see RingPlan.

    Attributes:
        K: experts of a token. take_rows: rows of a receiver in shared memory, 1 to 4.
    """

    K: int = 8
    take_rows: int = 1

    kernel: ClassVar[str] = "rank_dispatch"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.K < 1 or not 1 <= self.take_rows <= 4:
            raise ContractError(
                "a plan of dispatch", got=f"K={self.K}, take_rows={self.take_rows}", expected="K >= 1, 1 to 4 rows"
            )

    @property
    def roles(self) -> int:
        """Warps of a channel: a receiver; a sender and a forwarder where the topology has work for them."""
        return 1 + (self.R > 1) + (self.inter > 1)

    @property
    def channel_memory(self) -> int:
        return (self.take_rows + (self.roles - 1) * self.send_rows) * self.H * 2

    @property
    def fixed_memory(self) -> int:
        return self.R * -(-self.T // 32) * 8

    @property
    def slot(self) -> int:
        return -(-(self.H * 2 + self.K * 8) // 16) * 16

    @property
    def heap(self) -> int:
        return super().heap + aligned(self.R * 32 + 4 * (self.sms + 2 * self.R + 2 * self.R * self.T))

    def defines(self) -> dict[str, object]:
        return super().defines() | ({"TAKE_ROWS": self.take_rows} if self.bulk else {})


@dataclass(frozen=True)
class Received:
    """What came to one rank, on its GPU: written by each launch.

    Attributes:
        rows: [R * T, H], ids: [R * T, K] int32 local experts (-1: not here), weights: [R * T, K] fp32: the first A, in
            the order of the rank of origin, then of the token. A: [1] int32.
        masks: [R, T] int64. row_of: [R, T] int32. tokens: [R] int32. What RankCombine.bind takes as masks, rows and T.
    """

    rows: Tensor
    ids: Tensor
    weights: Tensor
    masks: Tensor
    row_of: Tensor
    tokens: Tensor
    A: Tensor

    @classmethod
    def empty(cls, plan: DispatchPlan, device: torch.device | str) -> Received:
        A, R, T = plan.R * plan.T, plan.R, plan.T

        def make(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            make(plan.dtype, A, plan.H),
            make(torch.int32, A, plan.K),
            make(torch.float32, A, plan.K),
            make(torch.int64, R, T),
            make(torch.int32, R, T),
            make(torch.int32, R),
            make(torch.int32, 1),
        )


class RankDispatch(RankKernel[DispatchPlan]):
    """Dispatch of ranks on one GPU; see RankKernel.

    Args:
        placement: of the experts on the group's ranks.

    Raises:
        ContractError: placement has another number of ranks. Others: as RankKernel.
    """

    local = _Local

    def __init__(
        self,
        plan: DispatchPlan,
        placement: Placement,
        device: int,
        ranks: Sequence[int],
        heaps: Sequence[int],
        timeout: float = 10.0,
    ):
        check_topology(plan, placement)
        super().__init__(plan, device, ranks, heaps, timeout)
        self._call.K, self._call.E = plan.K, placement.E
        where = f"cuda:{device}"
        self._owner = placement.device_of.to(where, torch.int32)
        self._local_of = [placement.local_of(rank).to(where, torch.int32) for rank in self.ranks]
        for local, table in zip(self._call.local, self._local_of, strict=False):
            local.owner, local.local_of = self._owner.data_ptr(), table.data_ptr()

    def bind(self, n: int, x: Tensor, ids: Tensor, weights: Tensor, T: Tensor, into: Received) -> None:
        """Tensors of the n-th rank here, for the launches that follow.

        Args:
            x: [T, H]. ids: [T, K] int32. weights: [T, K] fp32. T: [1] int32, tokens; more than the plan's count as
                that many. into: of this plan.
        """
        local = self._call.local[n]
        for name, tensor in zip(_INPUTS, (x, ids, weights, T), strict=True):
            setattr(local, name, tensor.data_ptr())
        for name in _OUTPUTS:
            setattr(local, f"out_{name}", getattr(into, name).data_ptr())
