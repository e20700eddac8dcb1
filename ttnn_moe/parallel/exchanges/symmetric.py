"""Memory that every rank's GPU reaches: torch's symmetric memory."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from . import agreement


def shared(nbytes: int, device: torch.device, group: dist.ProcessGroup, remedy: str) -> tuple[Tensor, list[int]]:
    """This rank's memory, uint8 [nbytes], zeroed on all ranks, and the addresses of every rank's.

    Every process of the group calls it.

    Args:
        remedy: of the error.

    Raises:
        BackendUnavailable: on all ranks: one has too little memory, or reaches not all of it.
    """
    why = "the ranks share no memory of their GPUs"
    # a rank that waits in rendezvous would not learn that another one has no memory
    with agreement.all_or_none(group, why, remedy):
        import torch.distributed._symmetric_memory as symmetric

        memory: Tensor = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
    with agreement.all_or_none(group, why, remedy):
        handle = symmetric.rendezvous(memory, group)
        memory.zero_()
        torch.cuda.synchronize(device)
    return memory, list(handle.buffer_ptrs)
