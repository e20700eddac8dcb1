"""Dispatch and combine of one rank on its GPU, with the tensors between them: inside one node, or over rings."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...contract import Placement
from ..jit import load
from . import few
from .few import FewCombinePlan, FewDispatchPlan
from .kernel import RankKernel, RingPlan, Stopped, stopped
from .node import NodeCombine, NodeCombinePlan, NodeDispatch, NodeDispatchPlan
from .rank_combine import Plan, RankCombine
from .rank_dispatch import DispatchPlan, RankDispatch, Received

Heap = Callable[[RingPlan], tuple[Tensor, list[int]]]
"""Makes this rank's heap of a plan, zeroed on all ranks; with the addresses of every rank's."""
SLOTS = 4


class Came(NamedTuple):
    """The first A of rows [R*T, H], ids [R*T, K] (local, -1: not here), weights [R*T, K] fp32. A: [1] int32."""

    rows: Tensor
    ids: Tensor
    weights: Tensor
    A: Tensor


class Sizes(NamedTuple):
    """inter, intra, H, T, dtype: as in RingPlan. K: experts of a token. sms: multiprocessors of a launch."""

    inter: int
    intra: int
    H: int
    T: int
    dtype: torch.dtype
    K: int
    sms: int
    fast: bool
    """Compute capability 9.0."""

    def plans(self) -> tuple[NodeDispatchPlan, NodeCombinePlan] | tuple[DispatchPlan, Plan]:
        """Of dispatch and combine.

        Raises:
            ContractError: no kernel takes these sizes.
        """
        size, fast = (self.inter, self.intra, self.H, self.T, self.dtype), self.fast
        if self.inter == 1 and self.T * self.H * self.dtype.itemsize <= few.MOST_BYTES:
            sms = few.blocks(self.intra * self.T, self.H, self.sms)
            return FewDispatchPlan(*size, sms, overlap=fast, K=self.K), FewCombinePlan(*size, sms, overlap=fast)
        where = *size, self.sms, SLOTS
        if self.inter == 1:
            return (
                NodeDispatchPlan(*where, bulk=fast, overlap=fast, K=self.K),
                NodeCombinePlan(*where, bulk=fast, overlap=fast),
            )
        return (
            DispatchPlan(*where, bulk=self.fast, overlap=self.fast, K=self.K),
            Plan(*where, bulk=self.fast, overlap=self.fast, wire=self.dtype),
        )


class Channel:
    """One rank's calls, of up to sizes.T tokens each: dispatch, then combine, by turns. Launches only.

    Attributes:
        alone: calls launch nothing, and nothing comes.
        came: what the last dispatch brought. expert_out: [R*T, H], what combine sums: a row for each of came's.
    """

    def __init__(self, sizes: Sizes, placement: Placement, rank: int, device: int, heap: Heap, timeout: float):
        where = torch.device("cuda", device)
        self.alone, self._device = False, device
        dispatch, combine = sizes.plans()
        (self._heap, to), (self._other, to_other) = heap(dispatch), heap(combine)
        self._status = torch.zeros(2, 8, dtype=torch.int32, device="cpu", pin_memory=True)
        self._words = self._status.numpy()  # the host reads it without waiting for the GPU
        self._dispatch: RankKernel
        self._combine: RankKernel
        if isinstance(dispatch, NodeDispatchPlan) and isinstance(combine, NodeCombinePlan):
            one = NodeDispatch(dispatch, placement, device, [rank], to, timeout)
            two = NodeCombine(combine, device, [rank], to_other, timeout)
            rows_at = torch.empty(dispatch.R, dispatch.T, dtype=torch.int32, device=where)
            firsts = torch.empty(dispatch.R + 1, dtype=torch.int32, device=where)
            self.came, self.expert_out = Came(*dispatch.rows(self._heap), firsts[-1:]), combine.rows(self._other)
            told = rows_at, dispatch.origins(self._heap), firsts
            self._bind = lambda x, ids, weights, T: one.bind(0, x, ids, weights, T, rows_at, firsts)
            self._bind_out = lambda out, T, bias: two.bind(0, *told, T, out, bias)
            self._dispatch, self._combine = one, two
        else:
            assert isinstance(dispatch, DispatchPlan) and isinstance(combine, Plan)
            first = RankDispatch(dispatch, placement, device, [rank], to, timeout)
            second = RankCombine(combine, device, [rank], to_other, timeout)
            got = Received.empty(dispatch, where)
            self.came, self.expert_out = Came(got.rows, got.ids, got.weights, got.A), torch.empty_like(got.rows)
            self._bind = lambda x, ids, weights, T: first.bind(0, x, ids, weights, T, got)
            self._bind_out = lambda out, T, bias: second.bind(
                0, self.expert_out, got.masks, got.row_of, got.tokens, out, bias
            )
            self._dispatch, self._combine = first, second

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor, T: Tensor) -> Came:
        """x [T, H], ids [T, K] int32, weights [T, K] fp32, contiguous; T: [1] int32, tokens that count."""
        if self.alone:
            self.came.A.zero_()
            return self.came
        self._bind(x, ids, weights, T)
        self._dispatch.launch()
        return self.came

    def combine(self, out: Tensor, T: Tensor, bias: Tensor | None = None) -> None:
        """Sums expert_out of all ranks, and bias [T, H], into out [T, H]; out may be bias. T: as for dispatch."""
        if self.alone:
            return
        self._bind_out(out, T, bias)
        self._combine.launch()

    def stopped(self) -> Stopped | None:
        """Why the group is dead; None: it lives. Waits for the GPU."""
        return stopped(self._heap) or stopped(self._other)

    def look(self) -> None:
        """The status, behind the calls so far, on its way to `seen`; waits for nothing."""
        from cuda.bindings import driver

        # torch's copy would keep an event, which a graph cannot hold
        stream = driver.CUstream(torch._C._cuda_getCurrentRawStream(self._device))
        for to, heap in zip(self._words, (self._heap, self._other), strict=True):
            load._check(driver.cuMemcpyDtoHAsync(to.ctypes.data, heap.data_ptr(), to.nbytes, stream))

    def seen(self) -> Stopped | None:
        """Why the group is dead, as far as the last `look` that is over knows. Waits for nothing."""
        for words in self._words:
            if words[3]:
                return Stopped(*words[4:8].tolist())
        return None
