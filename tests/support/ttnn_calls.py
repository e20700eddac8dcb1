"""Counts what a step calls of ttnn, or of the emulator's stand-in for it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from ttnn_moe.tenstorrent import Device, runtime

# On the host: tensors and settings made there, and moves between host and device.
HOST = {
    "CoreCoord",
    "CoreRange",
    "copy_host_to_device_tensor",
    "create_sharded_memory_config",
    "empty",
    "from_torch",
    "get_device_tensors",
    "num_cores_to_corerangeset_in_subcoregrids",
    "to_torch",
    "zeros",
}


class Calls:
    """ttnn, or the stand-in, with every function counted.

    Attributes:
        counts: by name; our own programs are "launch".
    """

    def __init__(self, ttnn: Any, counts: Counter[str]):
        self._ttnn, self.counts = ttnn, counts

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ttnn, name)
        if isinstance(found, SimpleNamespace):
            return Calls(found, self.counts)
        if isinstance(found, type) or not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            self.counts[name] += 1
            return found(*args, **options)

        return call

    @property
    def operators(self) -> int:
        """Those that run on the device."""
        return sum(n for name, n in self.counts.items() if name not in HOST)


def counted(patch: pytest.MonkeyPatch, device: Device) -> Calls:
    """Count what runs on an emulated device from now on."""
    calls = Calls(runtime.library(), Counter())
    launch = device.handle.launch

    def launched(*args: Any) -> None:
        calls.counts["launch"] += 1
        launch(*args)

    patch.setattr(type(device.handle), "launch", lambda self, *args: launched(*args))
    patch.setattr(runtime, "_emulated", calls)
    return calls
