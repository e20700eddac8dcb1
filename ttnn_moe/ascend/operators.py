"""torch_npu, imported when first needed, and what of it this backend calls.

Importing torch_npu needs CANN. Where torch_npu is installed without it, torch's own import fails too, unless
TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from importlib import metadata
from typing import Any

import torch

ROUTE, MATMUL = "npu_moe_init_routing_v2", "npu_grouped_matmul"
SWIGLU, UNPERMUTE = "npu_swiglu", "npu_moe_token_unpermute"
LAYER = (ROUTE, MATMUL, SWIGLU, UNPERMUTE)
FORMAT = "npu_format_cast"

DISPATCH, COMBINE = "npu_moe_distribute_dispatch_v2", "npu_moe_distribute_combine_v2"
EXCHANGE = (DISPATCH, COMBINE)


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
