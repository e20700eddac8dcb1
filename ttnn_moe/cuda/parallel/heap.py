"""Memory of a rank that the kernels of every rank write: gpu_kernels/cuda/parallel/heap.cuh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import ContractError

MOST_RANKS, WORDS_AT, TILES = 8, 8192, 1024
REPORT, SAID, TIMEOUT, CALLS = 64, 72, 80, 128


class Report(NamedTuple):
    """Rank `reporter` waited in vain, in its call `call`, for rank `peer`."""

    peer: int
    reporter: int
    call: int


class Heap:
    """One rank's.

    Args:
        memory: uint8, zeros, of nbytes(ranks, capacity, room) bytes on the rank's GPU.
        addresses: of every rank's memory, as this GPU reaches them. rank: which of them is this one's.
        capacity, room: for words and for rows, in 16 bytes: see nbytes.
        timeout: seconds that a kernel waits for another rank.

    Attributes:
        said: [1] int64 on the host: the report as the kernels here know it; 0: none.
        alone: calls make their kernels ready, and launch nothing.

    Every rank makes its own before any of them launches a kernel.
    """

    def __init__(self, memory: Tensor, addresses: Sequence[int], rank: int, capacity: int, room: int, timeout: float):
        self.memory, self.rank, self.ranks, self.capacity, self.room = memory, rank, len(addresses), capacity, room
        if not 2 <= self.ranks <= MOST_RANKS or memory.numel() < nbytes(self.ranks, capacity, room):
            raise ContractError(
                "no heap of ranks",
                got=f"{self.ranks} ranks, {memory.numel()} bytes",
                expected=f"2 to {MOST_RANKS} ranks, {nbytes(self.ranks, capacity, room)} bytes",
            )
        self.alone = False
        # the host reads it without waiting for the GPU
        self.said = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=memory.is_cuda)
        self._look = self.said.numpy()
        words = torch.zeros(CALLS // 8, dtype=torch.int64, device="cpu")
        words[: self.ranks] = torch.tensor(addresses, device="cpu")
        words[SAID // 8], words[TIMEOUT // 8] = self.said.data_ptr(), int(timeout * 1e9)
        memory[:CALLS].view(torch.int64).copy_(words)

    @property
    def address(self) -> int:
        """Of this rank's heap, on its GPU."""
        return self.memory.data_ptr()

    def report(self) -> Report | None:
        """Who stopped, as far as kernels that are over know; None: nobody. Waits for nothing."""
        word = int(self._look[0])
        return Report((word & 0xFF) - 1, word >> 8 & 0xFF, word >> 32 & 0xFFFFFFFF) if word else None


def nbytes(ranks: int, capacity: int, room: int) -> int:
    """Bytes of a heap.

    Args:
        capacity: four elements each of a rank's part in a call of few rows. room: eight elements each, of many.
    """
    return WORDS_AT + ranks * (32 * capacity + 16 * TILES + 32 * room)
