"""Versions of CANN and of the NPU driver, which torch_npu does not always tell."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

# where the driver says what it is, under its default folder; torch_npu can ask newer CANNs only
DRIVER_INFO = Path("/usr/local/Ascend/driver/version.info")
# set by CANN's set_env.sh, the newer name first
CANN_HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
# under the folder that they name; <arch>-linux is a folder of its own
CANN_INFOS = ("*-linux/ascend_toolkit_install.info", "ascend_toolkit_install.info", "version.info")


def cann(module: Any) -> str:
    """CANN's version, as in "8.5.0" or "8.3.RC1"; nothing where neither torch_npu nor the installation tells.

    module: torch_npu. The installation is the one that ASCEND_HOME_PATH names.
    """
    if found := _told(module, "CANN"):
        return found
    for home in filter(None, map(os.environ.get, CANN_HOMES)):
        for name in CANN_INFOS:
            for path in sorted(Path(home).glob(name)):
                if found := _written(path):
                    return found
    return ""


def driver(module: Any) -> str:
    """The NPU driver's version, or nothing where it cannot be found."""
    return _told(module, "DRIVER") or _written(DRIVER_INFO)


def _told(module: Any, of: str) -> str:
    """What torch_npu says: it has the function in one of two places, and it raises where a version is no text."""
    for utils in (getattr(getattr(module, "npu", None), "utils", None), getattr(module, "utils", None)):
        get = getattr(utils, "get_cann_version", None)
        if get is not None:
            try:
                return str(get(of) or "").strip()
            except (RuntimeError, ValueError, TypeError):  # UnicodeDecodeError is a ValueError
                return ""
    return ""


def _written(path: Path) -> str:
    """The version that a file says on a line of its own, such as "version=8.5.0" or "Version=25.2.0"."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    match = re.search(r"^\s*version\s*=\s*(\S+)", text, re.IGNORECASE | re.MULTILINE)
    return match[1] if match else ""


def is_older(version: str, least: str) -> bool:
    """Whether a version of CANN or of a driver comes before another: 24.1.0 < 25.0.RC1 < 25.0.RC1.1 < 25.0.0."""
    return _parts(version) < _parts(least)


def _parts(version: str) -> list[tuple[bool, int]]:
    """A part with letters (RC1) comes before any number in its place."""
    parts = re.findall(r"([A-Za-z]*)(\d+)", version)
    return [(not letters, int(number)) for letters, number in parts]
