"""Sums of ranks' parts on their devices: by torch.distributed, and on GPUs of one host by kernels."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from ...cuda.parallel import heap, sums
from ...errors import BackendUnavailable
from ...logs import logger
from ..exchanges import symmetric
from ..exchanges.exchange import world_of
from .ranks import Ranks

ROWS = 4096
"""Rows that a kernel adds at a time."""
REMEDY = "ranks on GPUs of one host, with more memory free"
GATHERED = 32
"""Rows of logits that a kernel gathers at a time."""


def few(ranks: int) -> int:
    """Up to so many rows, a flag in every word is faster than two hops: measured on two and on four GPUs."""
    return 256 if ranks == 2 else 64


class Collectives:
    """Every rank makes the same calls in the same order. All ranks get the same bits."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks

    def add(self, part: Tensor, x: Tensor) -> Tensor:
        """x [T, H] plus the sum of every rank's part [T, H]; both may be overwritten."""
        if part.numel():
            dist.all_reduce(part, group=self.ranks.group)
        return x + part

    def gather(self, part: Tensor) -> Tensor:
        """[R, D * n] of every rank's [R, n], in ascending rank."""
        whole = part.new_empty(self.ranks.size, *part.shape)
        if part.numel():
            dist.all_gather(list(whole.unbind()), part.contiguous(), group=self.ranks.group)
        return whole.transpose(0, 1).flatten(1)

    def least(self, n: int) -> int:
        """The least of every rank's n. The hosts meet, so it is for what ranks agree on before the first step."""
        return min(map(int, self.ranks.meet(str(n))))

    def check(self) -> None:
        """Raise RankStopped where a rank waited in vain for another one. Waits for nothing."""


class PeerMemorySums(Collectives):
    """On GPUs of one host, by kernels that no absent rank can hang. All ranks meet before the first sum.

    Args:
        H, V: columns of sums, and columns of a rank's part of what is gathered.

    Raises:
        BackendUnavailable: the GPUs share no memory.
    """

    def __init__(self, ranks: Ranks, H: int, V: int):
        super().__init__(ranks)
        capacity = max(few(ranks.size) * H, GATHERED * V) // 4
        sizes = capacity, ROWS * H // 8
        nbytes = heap.nbytes(ranks.size, *sizes)
        memory, addresses = symmetric.shared(nbytes, ranks.device, world_of(ranks.group), REMEDY)
        self.heap = heap.Heap(memory, addresses, ranks.rank, *sizes, ranks.timeout)

    def add(self, part: Tensor, x: Tensor) -> Tensor:
        T, h = len(part), self.heap
        if not x.is_contiguous() or x.data_ptr() % 16:
            return super().add(part, x)
        if T <= few(h.ranks) and sums.why_not(h, part) is None:
            return sums.add(h, part, x)
        if sums.why_not_many(h, part[:ROWS]) is not None:
            return super().add(part, x)
        for first in range(0, T, ROWS):
            sums.add_many(h, part[first : first + ROWS], x[first : first + ROWS])
        return x

    def gather(self, part: Tensor) -> Tensor:
        T, n = part.shape
        rows = sums.rows_of(self.heap, n)
        if sums.why_not(self.heap, part[:rows]) is not None:
            return super().gather(part)
        out = part.new_empty(T, self.ranks.size * n)
        for first in range(0, T, rows):
            sums.gather(self.heap, part[first : first + rows], out[first : first + rows])
        return out

    def check(self) -> None:
        found = self.heap.report()
        if found is not None:
            raise self.ranks.stopped(found.peer, f"rank {found.reporter} waited in vain for its part of a sum")


def sums_of(ranks: Ranks, H: int, V: int) -> Collectives:
    """What serves these ranks; every rank calls it. Arguments as PeerMemorySums."""
    plain = Collectives(ranks)
    if ranks.device.type != "cuda" or not 2 <= ranks.size <= heap.MOST_RANKS:
        return plain
    made, why = plain, ""
    try:
        made = PeerMemorySums(ranks, H, V)
    except BackendUnavailable as error:
        why = str(error)
    reasons = [said for said in ranks.meet(why) if said]
    if reasons:
        logger.warning("sums go by torch.distributed: {}", reasons[0])
    return plain if reasons else made
