"""Process groups as HCCL names them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from ..errors import BackendUnavailable

_OWN: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def own_group() -> dist.ProcessGroup:
    """A group of all processes for torch_npu's exchange operators alone; all layers share it.

    No other operator may use the group of those operators. Every process asks for it, as every process makes the layer.
    """
    world = dist.group.WORLD
    assert world is not None
    if world not in _OWN:
        _OWN[world] = dist.new_group()
    return _OWN[world]


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
