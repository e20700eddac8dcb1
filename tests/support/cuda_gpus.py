"""GPUs that are not here, and a GPU that nothing may wait for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from ttnn_moe.cuda import device
from ttnn_moe.cuda.arch import why_not_hopper
from ttnn_moe.cuda.device import Gpu

SHARED_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227}
"""Shared memory that a block may have, by compute capability; 99 elsewhere."""


def gpu_of(capability: tuple[int, int], multiprocessors: int = 132) -> Gpu:
    return Gpu(capability, multiprocessors, SHARED_KIB.get(capability, 99) << 10)


def runs_hopper_code() -> bool:
    """Whether the first GPU has compute capability 9.0, and does not stand for an older one."""
    return torch.cuda.is_available() and why_not_hopper(torch.device("cuda", 0)) is None


not_hopper = pytest.mark.skipif(not runs_hopper_code(), reason="no GPU runs code of compute capability 9.0 here")


@contextmanager
def no_host_sync(refused: bool = True) -> Iterator[None]:
    """Make whatever waits for the GPU raise, where `refused`."""
    torch.cuda.set_sync_debug_mode("error" if refused else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def pretend(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    """Every device is that GPU, as far as choosing and grids go."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(device, "query", lambda _: gpu)
