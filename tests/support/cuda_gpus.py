"""GPUs that are not here."""

from __future__ import annotations

import pytest

from ttnn_moe.cuda import device
from ttnn_moe.cuda.device import Gpu

SHARED_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227}
"""Shared memory that a block may have, by compute capability; 99 elsewhere."""


def gpu_of(capability: tuple[int, int], multiprocessors: int = 132) -> Gpu:
    return Gpu(capability, multiprocessors, SHARED_KIB.get(capability, 99) << 10)


def pretend(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    """Every device is that GPU, as far as choosing and grids go."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(device, "query", lambda _: gpu)
