"""Counts what makes the host wait for a device, or copies to it from the host, in Python code that runs on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

READS = "tolist item cpu numpy nonzero masked_select unique bincount repeat_interleave".split()
READS += "__bool__ __int__ __float__ __index__ __iter__ tensor as_tensor from_numpy".split()


class HostWaits(TorchFunctionMode):
    """Names of the calls that would wait, in order. What an operator does inside is not seen.

    A copy to a device counts too, as a blocking one synchronises an NPU's stream: `to` with a device, although it is
    the tensor's own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        to_device = name == "to" and any(isinstance(a, (str, torch.device)) for a in (*args[1:], *kwargs.values()))
        masked = name in ("__getitem__", "__setitem__") and _has_mask(args[1])
        if name in READS or to_device or masked:
            self.names.append(name)
        return func(*args, **kwargs)


def _has_mask(index: Any) -> bool:
    return any(
        isinstance(i, Tensor) and i.dtype == torch.bool for i in (index if isinstance(index, tuple) else (index,))
    )
