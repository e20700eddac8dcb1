"""What tests of models on emulated chips share."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from own_registry import own_registry
from ttnn_moe import tenstorrent
from ttnn_moe.tenstorrent.runtime import DEVICE, EMULATOR


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No device is open before or after."""
    if importlib.util.find_spec("ttnn_moe._planner") is None:
        pytest.skip("ttnn_moe._planner is not built: plans come from it")
    monkeypatch.setenv(DEVICE, EMULATOR)
    found = tenstorrent.device.probe()
    if not found.available:
        pytest.skip(found.reason)
    tenstorrent.close_device()
    with own_registry():
        yield
    tenstorrent.close_device()
