"""Peer access between the GPUs of one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...errors import BackendUnavailable


def enable(devices: Sequence[int]) -> None:
    """Each of these GPUs may read and write the others' memory.

    Raises:
        BackendUnavailable: two of them have no peer access.
    """
    from cuda.bindings import driver

    contexts = {}
    for device in devices:
        torch.cuda.synchronize(device)
        _, contexts[device] = driver.cuDevicePrimaryCtxRetain(device)
    for here in devices:
        with torch.cuda.device(here):
            driver.cuCtxSetCurrent(contexts[here])
            for peer in devices:
                if peer == here:
                    continue
                (status,) = driver.cuCtxEnablePeerAccess(contexts[peer], 0)
                if status not in (0, driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED):
                    raise BackendUnavailable(
                        f"GPU {here} has no access to the memory of GPU {peer}",
                        got=status,
                        remedy="GPUs that `nvidia-smi topo -p2p r` lists as OK",
                    )
