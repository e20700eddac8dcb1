"""torch's default dtype and device, for the time of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def defaults(dtype: torch.dtype | None = None, device: str | None = None) -> Iterator[None]:
    """None: as it is."""
    before = torch.get_default_dtype(), torch.get_default_device()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    if device is not None:
        torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(before[0])
        if device is not None:
            torch.set_default_device(None if before[1].type == "cpu" else before[1])
