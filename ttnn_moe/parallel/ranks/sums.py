"""Sums of ranks' parts on their devices: by torch.distributed, and on GPUs of one host by kernels."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from ...cuda.parallel import heap, sums
from ...errors import BackendUnavailable, ContractError, GradientsRefused, RequestError
from ...logs import logger
from ...visible import said
from ..exchanges import agreement, symmetric
from ..exchanges.exchange import world_of
from ..stopped import RankStopped, of_a_collective
from .ranks import Ranks

ROWS = 4096
"""Rows that a kernel adds at a time."""
REMEDY = "ranks on GPUs of one host, with more memory free"
GATHERED = 32
"""Rows of logits that a kernel gathers at a time."""
_ALIKE = (ContractError, GradientsRefused, RequestError, RankStopped)
"""What every rank finds: in its input, or as no rank can go on. One rank alone may lack a kernel or a device."""


def few(ranks: int) -> int:
    """Up to so many rows, a flag in every word is faster than two hops: measured on two and on four GPUs."""
    return 256 if ranks == 2 else 64


class Collectives:
    """Every rank makes the same calls in the same order. All ranks get the same bits.

    A rank whose step failed may be some sums apart from the others, whose parts would meet those of another step. So
    it takes no further step. All ranks make theirs together.
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self._alone = self._captures = False
        self._failure: RankStopped | None = None
        # the error of a capture, which all ranks raised; weak, as its frames hold tensors
        self._agreed: Callable[[], BaseException | None] = lambda: None
        if ranks.device.type != "cpu":  # the first collective connects ranks, which no capture may do
            dist.all_reduce(torch.zeros(1, device=ranks.device), group=ranks.group)

    def add(self, part: Tensor, x: Tensor) -> Tensor:
        """x [T, H] plus the sum of every rank's part [T, H]; both may be overwritten."""
        if part.numel() and not self._alone:
            dist.all_reduce(part, group=self.ranks.group)
        return x + part

    def gather(self, part: Tensor) -> Tensor:
        """[R, D * n] of every rank's [R, n], in ascending rank."""
        whole = part.new_empty(self.ranks.size, *part.shape)
        if part.numel() and not self._alone:
            dist.all_gather(list(whole.unbind()), part.contiguous(), group=self.ranks.group)
        return whole.transpose(0, 1).flatten(1)

    def least(self, n: int) -> int:
        """The least of every rank's n. The hosts meet, so it is for what ranks agree on before the first step."""
        return min(map(int, self.ranks.meet(str(n))))

    def check(self) -> None:
        """Raise RankStopped where a rank waited in vain for another one. Waits for nothing."""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Calls inside send nothing; their kernels are made ready."""
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step of all ranks is inside.

        Raises:
            RankStopped: an earlier one failed on this rank.
        """
        if self._failure is not None:
            raise self._failure.again()
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """A step of this rank ended with this error. What every rank finds, as in its input, ends no later step."""
        agreed = self._captures or error is self._agreed() or isinstance(error, _ALIKE)
        if self._failure is None and not agreed:
            peer = -1 if of_a_collective(error) else self.ranks.rank
            self._failure = RankStopped(peer, self.ranks.rank, said(error))

    @contextmanager
    def captures(self) -> Iterator[None]:
        """This rank captures a step inside, which sends nothing. Every rank calls it; then the hosts meet.

        Raises:
            BackendUnavailable: on all ranks: one failed; which, and why.
        """
        what, remedy = "a rank cannot capture a step", "leave more memory of each device free, or graphs=False"
        self._captures = True
        try:
            with agreement.all_or_none(self.ranks.group, what, remedy, tell=self.ranks.meet):
                yield
        except BackendUnavailable as error:
            self._agreed = weakref.ref(error)
            raise
        finally:
            self._captures = False


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
        world = world_of(ranks.group)
        memory, addresses = symmetric.shared(nbytes, ranks.device, world, REMEDY)
        with agreement.all_or_none(world, "a rank cannot make its sums ready", REMEDY):
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

    @contextmanager
    def alone(self) -> Iterator[None]:
        self.heap.alone = True
        try:
            with super().alone():
                yield
        finally:
            self.heap.alone = False

    def check(self) -> None:
        found = self.heap.report()
        if found is not None:
            raise self.ranks.stopped(found.peer, f"rank {found.reporter} waited in vain for its part of a sum")


def sums_of(ranks: Ranks, H: int, V: int) -> Collectives:
    """What serves these ranks; every rank calls it. Arguments as PeerMemorySums."""
    if ranks.device.type != "cuda" or not 2 <= ranks.size <= heap.MOST_RANKS:
        return Collectives(ranks)
    made, why = None, ""
    try:
        made = PeerMemorySums(ranks, H, V)
    except BackendUnavailable as error:
        why = str(error)
    reasons = [said for said in ranks.meet(why) if said]
    if reasons:
        logger.warning("sums go by torch.distributed: {}", reasons[0])
    return Collectives(ranks) if made is None or reasons else made
