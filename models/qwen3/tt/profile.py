"""Time by operator: ttnn's hooks wait for the device around every operation and read the host's clock.

The chip's own timers need a build of ttnn with Tracy. The wheel is built without: it cannot be imported while
TT_METAL_DEVICE_PROFILER is set.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ttnn_moe.errors import RequestError
from ttnn_moe.tenstorrent import Device
from ttnn_moe.tenstorrent.launch import name_of
from ttnn_moe.tenstorrent.runtime import is_emulator, library, wanted

OVERRIDES = "TTNN_CONFIG_OVERRIDES"
_FAST = "enable_fast_runtime_mode"


@dataclass
class Profile:
    """Calls and time of each operator.

    Attributes:
        calls, seconds: by name. The name is ttnn's, or the folder of our kernels.
    """

    calls: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def rows(self) -> dict[str, str]:
        """Rows of a table, the longest time first."""
        longest = sorted(self.seconds, key=self.seconds.__getitem__, reverse=True)
        return {f"{name} ({self.calls[name]})": f"{self.seconds[name] * 1e3:.1f} ms" for name in longest}


def prepare(device: str | None) -> None:
    """Make ttnn call hooks. It reads this setting when it is imported.

    Raises:
        RequestError: on the emulator, or if ttnn was imported without its hooks.
    """
    if is_emulator(wanted() if device is None else device):
        raise RequestError(
            "operators cannot be timed",
            got="the emulator",
            expected="a device or simulator",
            remedy="leave --profile out; benchmarks/tenstorrent_cost.py says what our operators cost",
        )
    loaded = sys.modules.get("ttnn")
    if loaded is None:
        asked = json.loads(os.environ.get(OVERRIDES) or "{}")
        os.environ[OVERRIDES] = json.dumps({**asked, _FAST: False})
    elif getattr(loaded.CONFIG, _FAST):
        raise RequestError(
            "operators cannot be timed",
            got="ttnn, imported already, without its hooks",
            remedy=f"""start with {OVERRIDES}='{{"{_FAST}": false}}'""",
        )


@contextmanager
def profiled(device: Device) -> Iterator[Profile]:
    """Time every operator that runs inside the `with` block. Each waits for the one before."""
    ttnn = library()

    found, started = Profile(), [0.0]

    def before(operation: Any, args: Any, kwargs: Any) -> None:
        ttnn.synchronize_device(device.handle)
        started[0] = time.perf_counter()

    def after(operation: Any, args: Any, kwargs: Any, output: Any) -> None:
        ttnn.synchronize_device(device.handle)
        found.add(_name(operation, args), time.perf_counter() - started[0])

    with ttnn.register_pre_operation_hook(before), ttnn.register_post_operation_hook(after):
        yield found


def _name(operation: Any, args: Any) -> str:
    name = str(operation.python_fully_qualified_name)
    return name_of(args[1]) or name if name == "ttnn.generic_op" else name
