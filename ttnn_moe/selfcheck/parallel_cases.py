"""Expert parallelism under torchrun, with a process and a device for each rank: every exchange that can run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..backend import Backend, RunsOnNpu
from ..contract import Placement, Problem
from ..errors import BackendUnavailable, ContractError
from ..parallel import ExpertParallel
from ..parallel.exchanges import EXCHANGES, Topology, agreement
from ..parallel.exchanges.npu_limits import RANKS_OF_A_SERVER
from ..parallel.exchanges.npu_plan import plan
from ..parallel.ranks import check_launched, own_device
from ..sizes import natural
from .bounds import BOUND
from .check import Check, repeated
from .contract_cases import expected
from .edges import Case, Inputs

LIBRARIES = {"npu": "hccl", "cuda": "nccl"}


def start(device: str) -> tuple[int, int]:
    """(rank, number of ranks): under torchrun torch.distributed is started on this rank's device; else (0, 1).

    Raises:
        BackendUnavailable: see own_device; or other variables of torchrun are missing. ContractError: WORLD_SIZE is no
            number of processes.
    """
    said = os.environ.get("WORLD_SIZE") or "1"
    size = natural(said)
    if not size:
        raise ContractError(
            "WORLD_SIZE is no number of processes",
            got=repr(said),
            expected="a whole number from 1 on",
            remedy="unset it, or start the processes with torchrun",
        )
    if size == 1:
        return 0, 1
    if not dist.is_initialized():
        check_launched()
    if device != "cpu":
        own_device(device)
    if not dist.is_initialized():
        dist.init_process_group(LIBRARIES.get(device, "gloo"))
    return dist.get_rank(), size


def stop(in_step: bool, failed: list[str]) -> list[list[str]] | None:
    """Leave the group of `start`; returns what failed on each rank. Ranks that are not in step do not: None."""
    if not (in_step and dist.is_initialized()):
        return None
    of_ranks = agreement.gather(failed, None)
    dist.barrier()
    dist.destroy_process_group()
    return of_ranks


def refusals(backend: Backend, dtype: torch.dtype) -> Iterator[Check]:
    """What must be refused before a launch, on any number of ranks; nothing of it is launched."""
    if not isinstance(backend, RunsOnNpu):
        return
    D = 2 * RANKS_OF_A_SERVER
    here = replace(backend.machine(), lacks=(), cards=RANKS_OF_A_SERVER, network="switch")
    machines = [replace(here, server=str(rank // RANKS_OF_A_SERVER), buffer="1") for rank in range(D)]
    problem = Problem(128, 128, 8, 2048, 768, dtype, D=D)

    def reason(buffer: str | None = None) -> str:
        try:
            plan(problem, Placement.uniform(128, D, 0), [replace(one, buffer=buffer or "1") for one in machines])
        except BackendUnavailable as error:
            return str(error)
        return ""

    known = reason("100000")  # with room enough: another rule, such as an unknown CANN
    yield Check(
        "HCCL_BUFFSIZE=1 for Qwen3-30B-A3B on 16 ranks is refused before a launch",
        lambda: torch.tensor([[float("export HCCL_BUFFSIZE=" in reason())]]),
        lambda: torch.ones(1, 1),
        0.0,
        known,
        once=True,
    )


def checks(backend: Backend, device: str, dtype: torch.dtype) -> Iterator[Check]:
    """Each exchange that can run here: this rank's tokens through the experts of all ranks.

    All ranks run them together, so that a check that raises on one rank must be the last on every rank.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    case = Case("parallel", E=4 * size)
    plain = case.make(dtype, tokens_seed=1 + rank)
    # dealt out: not contiguous
    placement = Placement.from_mapping([list(range(d, case.E, size)) for d in range(size)], rank)
    numerics = backend.numerics(plain.problem)
    # one layer for all calls: T and with it global_bs are those of a group
    problem = plain.to(device).problem

    @cache
    def layer(exchange: str) -> ExpertParallel:
        experts = plain.to(device).experts.for_device(placement)
        return ExpertParallel(problem, experts, placement, backend=backend.name, exchange=exchange)

    def call(exchange: str, inputs: Inputs) -> Tensor:
        there = inputs.to(device)
        return layer(exchange)(there.hidden, there.ids, there.weights)

    topology = Topology(placement, backend)
    for kind in reversed(EXCHANGES):
        # one rank's reason is all ranks': else the others would wait in the calls that it leaves out
        name, refused = kind.name, agreement.reason_of_any(kind.why_not(problem, topology), None) or ""
        title = f"expert parallel over {size} ranks, {name}"
        for what, change in CHANGES.items():
            inputs = change(plain, placement)
            yield Check(
                title + what, partial(call, name, inputs), partial(expected, inputs, numerics), BOUND[dtype], refused
            )
        yield repeated(title, partial(call, name, plain), refused)


def _skewed(x: Inputs, placement: Placement) -> Inputs:
    """Every token of every rank goes to rank 0: the others receive nothing."""
    there = placement.device_expert_mapping[0, : x.ids.shape[1]]
    return replace(x, ids=there.expand_as(x.ids).contiguous())


def _silent(x: Inputs, placement: Placement) -> Inputs:
    """Odd ranks have tokens without an expert: they send nothing."""
    return replace(x, ids=torch.full_like(x.ids, -1)) if (placement.rank or 0) % 2 else x


def _empty(x: Inputs, placement: Placement) -> Inputs:
    """Only rank 0 has tokens."""
    return replace(x, hidden=x.hidden[:0], ids=x.ids[:0], weights=x.weights[:0]) if placement.rank else x


CHANGES: dict[str, Callable[[Inputs, Placement], Inputs]] = {
    "": lambda x, placement: x,
    ", all tokens to rank 0": _skewed,
    ", odd ranks send nothing": _silent,
    ", only rank 0 has tokens": _empty,
}
