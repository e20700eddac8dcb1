"""The library that drives devices: ttnn, or the emulator's stand-in for it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

DEVICE = "TTNN_MOE_TT_DEVICE"
EMULATOR = "emulator"
PLANNER_REMEDY = "install the project (`make demo`, or `pip install -e .`): that builds ttnn_moe._planner"

_emulated: Any = None


@runtime_checkable
class RunsPlans(Protocol):
    """A device that runs the planner's programs as they are: an emulated one. ttnn's devices take descriptors."""

    def launch(self, program: Any, tensors: Mapping[str, Any], scalars: Mapping[str, int]) -> None:
        """Run a program with these tensors and numbers, by their names in the plan."""


def wanted() -> str:
    """What TTNN_MOE_TT_DEVICE names: "" (a card or a simulator, through ttnn), "emulator", "emulator:n150" ..."""
    return os.environ.get(DEVICE, "")


def is_emulator(device: object) -> bool:
    """Whether a device name asks for the emulator: "emulator" or "emulator:CHIP"."""
    return isinstance(device, str) and device.partition(":")[0] == EMULATOR


def use(emulated: Any) -> None:
    """Make `library` return this stand-in for ttnn. None: ttnn again."""
    global _emulated
    _emulated = emulated


def library() -> Any:
    """ttnn, or the stand-in that `use` was given."""
    if _emulated is not None:
        return _emulated
    return sys.modules.get("ttnn") or importlib.import_module("ttnn")
