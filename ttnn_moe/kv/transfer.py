"""Host values on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..accelerator import upload


def to_device(values: Sequence[Any], device: torch.device) -> Tensor:
    """An int64 tensor of these values. The copy comes from pinned memory, so the host does not wait for the device."""
    return upload(torch.tensor(values, dtype=torch.int64), device)
