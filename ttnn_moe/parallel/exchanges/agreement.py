"""What the processes of a group tell each other when they make a layer, and once after its first call."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from ..compare import compare

_MACHINES: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Any]] = weakref.WeakKeyDictionary()


def gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The value of each process of the group, by rank; all call together."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def machines(backend: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """backend.machine() of each rank: gathered once for a group, when all processes first ask together."""
    key = group or dist.group.WORLD
    assert key is not None
    found = _MACHINES.get(key)
    if found is None:
        found = _MACHINES[key] = gather(backend.machine(), group)
    return found


def check_same(group: dist.ProcessGroup | None, **values: object) -> None:
    """Every process must make the layer with the same values: else messages of two sizes would meet.

    Raises:
        ContractError: on all processes; see compare.
    """
    if dist.get_world_size(group) > 1:
        compare(gather({name: str(value) for name, value in values.items()}, group), "one layer", "arguments")


def all_succeeded(mine: bool, device: torch.device, group: dist.ProcessGroup | None) -> bool:
    """Whether all processes did; waits for them."""
    flag = torch.tensor([mine], dtype=torch.int32, device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return bool(flag)
