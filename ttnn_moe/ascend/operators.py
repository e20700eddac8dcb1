"""torch_npu, imported when first needed, what of it this backend calls, and the versions of what is under it.

Importing torch_npu needs CANN. Where torch_npu is installed without it, torch's own import fails too, unless
TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROUTE, MATMUL = "npu_moe_init_routing_v2", "npu_grouped_matmul"
SWIGLU, UNPERMUTE = "npu_swiglu", "npu_moe_token_unpermute"
LAYER = (ROUTE, MATMUL, SWIGLU, UNPERMUTE)
FORMAT = "npu_format_cast"

DISPATCH, COMBINE = "npu_moe_distribute_dispatch_v2", "npu_moe_distribute_combine_v2"
EXCHANGE = (DISPATCH, COMBINE)

# where the driver says what it is, under its default folder; torch_npu can ask newer CANNs only
DRIVER_INFO = Path("/usr/local/Ascend/driver/version.info")


def installed() -> bool:
    """Whether torch_npu is installed; does not import it."""
    return importlib.util.find_spec("torch_npu") is not None


def load() -> Any:
    """The torch_npu module.

    Raises:
        ImportError, OSError: it is not installed, or a library of CANN is missing.
    """
    return importlib.import_module("torch_npu")


def missing(module: Any, names: Iterable[str] = LAYER) -> list[str]:
    """Those of the operators that this torch_npu does not have."""
    return [name for name in names if not hasattr(module, name)]


def torch_it_is_for() -> str | None:
    """The minor version of torch that the installed torch_npu is for, where torch's is another; else None."""
    try:
        minor = metadata.version("torch_npu").split(".")[:2]
    except metadata.PackageNotFoundError:
        return None
    return None if torch.__version__.split(".")[:2] == minor else ".".join(minor)


def cann_version(module: Any) -> str:
    """CANN's version, or nothing where torch_npu cannot tell."""
    return _version(module, "CANN")


def driver_version(module: Any) -> str:
    """The NPU driver's version, or nothing where it cannot be found."""
    if found := _version(module, "DRIVER"):
        return found
    text = DRIVER_INFO.read_text(errors="replace") if DRIVER_INFO.is_file() else ""
    match = re.search(r"^\s*version\s*=\s*(\S+)", text, re.IGNORECASE | re.MULTILINE)
    return match[1] if match else ""


def _version(module: Any, of: str) -> str:
    get = getattr(getattr(getattr(module, "npu", None), "utils", None), "get_cann_version", None)
    return get(of) if get is not None else ""


def is_older(version: str, least: str) -> bool:
    """Whether a version of CANN or of a driver comes before another: 24.1.0 < 25.0.RC1 < 25.0.RC1.1 < 25.0.0."""
    return _parts(version) < _parts(least)


def _parts(version: str) -> list[tuple[bool, int]]:
    """A part with letters (RC1) comes before any number in its place."""
    parts = re.findall(r"([A-Za-z]*)(\d+)", version)
    return [(not letters, int(number)) for letters, number in parts]
