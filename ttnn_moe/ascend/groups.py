"""Process groups as HCCL names them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from ..errors import BackendUnavailable

_OWN: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
_GLOBAL_BS: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def own_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A group of the same processes (default: all) for torch_npu's exchange operators alone; all layers share it.

    No other operator may use the group of those operators. The processes of the group ask together.
    """
    key = group or dist.group.WORLD
    assert key is not None
    if key not in _OWN:
        if key is dist.group.WORLD:
            _OWN[key] = dist.new_group()
        else:  # the processes outside do not know of it
            _OWN[key] = dist.new_group(dist.get_process_group_ranks(key), use_local_synchronization=True)
    return _OWN[key]


def global_bs(group: dist.ProcessGroup | None) -> int | None:
    """What the first layer of the exchange's group took as global_bs, which all layers share; None: there is none."""
    key = group or (dist.group.WORLD if dist.is_initialized() else None)
    return None if key is None else _GLOBAL_BS.get(key)


def take_global_bs(group: dist.ProcessGroup | None, value: int) -> None:
    """Remember it for the layers to come."""
    key = group or dist.group.WORLD
    assert key is not None
    _GLOBAL_BS[key] = value


def hccl(group: Any, device: str) -> Any:
    """HCCL's part of a process group.

    Raises:
        BackendUnavailable: it has none.
    """
    try:
        return group._get_backend(torch.device(device))
    except RuntimeError as error:
        raise BackendUnavailable(
            "the process group has no HCCL",
            got=str(error).splitlines()[0],
            remedy="torch.distributed.init_process_group('hccl'), or exchange='all_to_all'",
        ) from error
