"""What host code asks of an accelerator, whichever it is: copies that do not wait, free memory, its module in torch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

ACCELERATORS = ("cuda", "npu")
NO_DEVICE = (AssertionError, ImportError, RuntimeError, TypeError, ValueError)
"""What torch raises for a device that is not here: it depends on the device, and on how torch was built."""
_STAY = nullcontext()  # one for all: every operator asks


def is_accelerator(device: torch.device) -> bool:
    """Whether the device runs behind the host: a copy from pageable memory would wait for it."""
    return device.type in ACCELERATORS


def module_of(device: torch.device) -> Any:
    """torch.cuda, or torch.npu where torch_npu is imported: streams, events, graphs."""
    return torch.get_device_module(device)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Makes an accelerator the current one. Triton, graphs and events use that one, wherever the tensors are."""
    if not is_accelerator(device) or device.index == module_of(device).current_device():
        return _STAY
    current: AbstractContextManager[object] = module_of(device).device(device)
    return current


def on_host() -> AbstractContextManager[object]:
    """Tensors that are made without a device lie on the CPU, whatever torch.set_default_device says."""
    return _STAY if torch.get_default_device().type == "cpu" else torch.device("cpu")


def upload(host: Tensor, device: torch.device) -> Tensor:
    """A host tensor on a device. The copy comes from pinned memory, so the host does not wait."""
    return host.pin_memory().to(device, non_blocking=True) if is_accelerator(device) else host.to(device)


def free_memory(device: torch.device) -> int | None:
    """Bytes free on an accelerator; None: the device is none.

    torch first gives back what it holds unused, such as the memory of a cache that is gone.
    """
    if not is_accelerator(device):
        return None
    module = module_of(device)
    with suppress(RuntimeError):  # while another thread captures a graph, torch gives nothing back
        module.empty_cache()
    free: int = module.mem_get_info(device)[0]
    return free
