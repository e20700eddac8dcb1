"""Expert parallelism as checks, for `ttnn-moe selfcheck` under torchrun: a process and a device for each rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache

import torch
import torch.distributed as dist

from ..backend import Backend
from ..contract import Placement
from ..contract_checks import BOUND, Inputs, Sizes, expected, problem_of
from ..selfcheck import Check
from .layer import ExpertParallel

LIBRARIES = {"npu": "hccl", "cuda": "nccl"}


def start(device: str) -> tuple[int, int]:
    """(rank, number of ranks): under torchrun torch.distributed is started on this rank's device; else (0, 1)."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return 0, 1
    if device != "cpu":
        getattr(torch, device).set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        dist.init_process_group(LIBRARIES.get(device, "gloo"))
    return dist.get_rank(), size


def stop(in_step: bool) -> None:
    """Leave the group of `start`; ranks that are not in step cannot do so together."""
    if in_step and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def checks(backend: Backend, device: str, dtype: torch.dtype) -> Iterator[Check]:
    """Each exchange that the backend can have: this rank's tokens through the experts of all ranks.

    Every rank is to run them together, so that what one of them raises is to be the last that it runs.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    sizes = Sizes(E=4 * size)
    inputs = Inputs.of(sizes, dtype, rank=rank)
    there, problem = inputs.on(device), problem_of(sizes, dtype, device)
    # dealt out: not contiguous
    placement = Placement.from_mapping([list(range(d, sizes.E, size)) for d in range(size)], rank)

    @cache
    def layer(exchange: str) -> ExpertParallel:
        return ExpertParallel(
            problem, there.experts.for_device(placement), placement, backend=backend.name, exchange=exchange
        )

    for exchange in ("all_to_all", "dispatch_combine")[: 1 + hasattr(backend, "exchange")]:
        yield Check(
            f"expert parallel over {size} ranks, {exchange}",
            lambda exchange=exchange: layer(exchange)(there.hidden, there.ids, there.weights),  # type: ignore[misc]
            lambda: expected(inputs, backend.numerics(problem)),
            BOUND[dtype],
        )
