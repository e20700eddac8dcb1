"""What the processes of a group tell each other when they make a layer, and once after its first call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...errors import BackendUnavailable
from ...visible import said
from ..compare import compare
from ..stopped import RankStopped

_MACHINES: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Any]] = weakref.WeakKeyDictionary()


class Unknown(NamedTuple):
    """What a rank tells instead of its machine."""

    why: str


def gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The value of each process of the group, by rank; all call together."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def machines(backend: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """backend.machine() of each rank: gathered once for a group, when all processes first ask together.

    Raises:
        BackendUnavailable: on all processes: one does not know its machine; which, and why.
    """
    key = group or dist.group.WORLD
    assert key is not None
    found = _MACHINES.get(key)
    if found is None:
        try:
            mine = backend.machine()
        except Exception as error:
            mine = Unknown(said(error))
        found = gather(mine, group)
        unknown = [f"rank {rank}: {one.why}" for rank, one in enumerate(found) if isinstance(one, Unknown)]
        if unknown:
            raise BackendUnavailable("a rank does not know its machine", details=unknown, remedy="another exchange")
        _MACHINES[key] = found
    return found


def check_same(group: dist.ProcessGroup | None, **values: object) -> None:
    """Every process must make the layer with the same values: else messages of two sizes would meet.

    Raises:
        ContractError: on all processes; see compare.
    """
    if dist.get_world_size(group) > 1:
        compare(gather({name: str(value) for name, value in values.items()}, group), "one layer", "arguments")


def reason_of_any(mine: str | None, group: dist.ProcessGroup | None) -> str | None:
    """The first reason that a process gives; None: none of them gives one. All processes get the same answer."""
    reasons = gather(mine, group)
    if len(set(reasons)) == 1:
        return mine
    return next(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None)


@contextmanager
def all_or_none(
    group: dist.ProcessGroup | None,
    what: str,
    remedy: str,
    own: tuple[type[Exception], ...] = (),
    tell: Callable[[str], Sequence[str]] | None = None,
) -> Iterator[None]:
    """Inside, each process does its own part, and waits for no other. Afterwards all know whether all succeeded.

    Args:
        own: errors that pass on the processes that raise them, such as of arguments.
        tell: gives what each process said, by rank; None: messages of the group do.

    Raises:
        BackendUnavailable: on all processes, with `what` and `remedy`: which failed, and why.
    """
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    mine = "" if failure is None else f"{type(failure).__name__}: {failure}"
    said = gather(mine, group) if tell is None else tell(mine)
    if failure is not None and isinstance(failure, own):
        raise failure
    if any(said):
        failed = [f"rank {rank}: {why}" for rank, why in enumerate(said) if why]
        raise BackendUnavailable(what, details=failed, remedy=remedy) from failure


def least(mine: int, device: torch.device, group: dist.ProcessGroup | None) -> int:
    """The least number of any process; waits for them."""
    number = torch.tensor([mine], dtype=torch.int32, device=device)
    dist.all_reduce(number, dist.ReduceOp.MIN, group=group)
    return int(number)


def stopped_by(mine: Exception | None, group: dist.ProcessGroup | None) -> Exception:
    """The error of a call that one process or more cannot finish: its own, or RankStopped that names the first.

    All processes know that they end this call, and call together. None: this process could go on.
    """
    said = None
    if mine is not None:
        said = (mine.peer, mine.why) if isinstance(mine, RankStopped) else (None, f"{type(mine).__name__}: {mine}")
    every = gather(said, group)
    if mine is not None:
        return mine
    rank, (peer, why) = next((rank, one) for rank, one in enumerate(every) if one is not None)
    return RankStopped(rank if peer is None else peer, dist.get_rank(group), why)
