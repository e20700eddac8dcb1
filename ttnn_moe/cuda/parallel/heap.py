"""Memory of a rank that the kernels of every rank write: gpu_kernels/cuda/parallel/heap.cuh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import BackendUnavailable, ContractError

MOST_RANKS, WORDS_AT = 8, 8192
REPORT, SAID, TIMEOUT, CALLS = 64, 72, 80, 128


class Report(NamedTuple):
    """Rank `reporter` waited in vain, in its call `call`, for rank `peer`."""

    peer: int
    reporter: int
    call: int


class Heap:
    """One rank's.

    Args:
        memory: uint8, zeros, of nbytes(ranks, capacity) bytes on the rank's GPU.
        addresses: of every rank's memory, as this GPU reaches them. rank: which of them is this one's.
        timeout: seconds that a kernel waits for another rank.

    Every rank makes its own before any of them launches a kernel.
    """

    def __init__(self, memory: Tensor, addresses: Sequence[int], rank: int, timeout: float):
        self.memory, self.rank, self.ranks = memory, rank, len(addresses)
        self.capacity = (memory.numel() - WORDS_AT) // (32 * self.ranks)
        if not 2 <= self.ranks <= MOST_RANKS or self.capacity < 1:
            raise ContractError(
                "no heap of ranks",
                got=f"{self.ranks} ranks, {memory.numel()} bytes",
                expected=f"2 to {MOST_RANKS} ranks, more than {WORDS_AT} bytes",
            )
        # the host reads it without waiting for the GPU
        self._said = torch.zeros(1, dtype=torch.int64, pin_memory=memory.is_cuda)
        self._look = self._said.numpy()
        words = torch.zeros(CALLS // 8, dtype=torch.int64)
        words[: self.ranks] = torch.tensor(addresses)
        words[SAID // 8], words[TIMEOUT // 8] = self._said.data_ptr(), int(timeout * 1e9)
        memory[:CALLS].view(torch.int64).copy_(words)

    @property
    def address(self) -> int:
        return self.memory.data_ptr()

    def report(self) -> Report | None:
        """Who stopped, as far as kernels that are over know; None: nobody. Waits for nothing."""
        word = int(self._look[0])
        return Report((word & 0xFF) - 1, word >> 8 & 0xFF, word >> 32 & 0xFFFFFFFF) if word else None


def nbytes(ranks: int, capacity: int) -> int:
    """Bytes of a heap for calls of at most `capacity` times four elements of a rank."""
    return WORDS_AT + 32 * ranks * capacity


def shared(group: Any, capacity: int, device: torch.device, timeout: float) -> Heap:
    """The heap of this process, in torch's symmetric memory. Every process of the group calls it.

    Raises:
        BackendUnavailable: torch cannot share memory between these GPUs.
    """
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    try:
        memory = symmetric.empty(nbytes(ranks, capacity), dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(memory, group)
    except RuntimeError as error:
        raise BackendUnavailable(
            "the GPUs of the ranks share no memory", got=error, remedy="ranks of one host, with peer access"
        ) from error
    memory.zero_()
    return Heap(memory, list(handle.buffer_ptrs), rank, timeout)
