"""Expert parallelism under torchrun, with a process and a device for each rank: every exchange that can run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache

import torch
import torch.distributed as dist

from ..backend import Backend
from ..contract import Placement
from ..parallel import ExpertParallel
from ..parallel.exchanges import EXCHANGES, Topology
from .bounds import BOUND
from .check import Check
from .contract_cases import expected
from .edges import Case

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
    """Each exchange that can run here: this rank's tokens through the experts of all ranks.

    All ranks run them together, so that a check that raises on one rank must be the last on every rank.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    case = Case("parallel", E=4 * size)
    inputs = case.make(dtype, tokens_seed=1 + rank)
    there = inputs.to(device)
    # dealt out: not contiguous
    placement = Placement.from_mapping([list(range(d, case.E, size)) for d in range(size)], rank)

    @cache
    def layer(exchange: str) -> ExpertParallel:
        experts = there.experts.for_device(placement)
        return ExpertParallel(there.problem, experts, placement, backend=backend.name, exchange=exchange)

    topology = Topology(placement, backend)
    for exchange in reversed(EXCHANGES):
        yield Check(
            f"expert parallel over {size} ranks, {exchange.name}",
            lambda name=exchange.name: layer(name)(there.hidden, there.ids, there.weights),  # type: ignore[misc]
            lambda: expected(inputs, backend.numerics(there.problem)),
            BOUND[dtype],
            exchange.why_not(there.problem, topology) or "",
        )
