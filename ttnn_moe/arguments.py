"""Checks of options that callers give: whatever comes, a Python number or an error of ours leaves."""

from __future__ import annotations

import numbers
import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import ContractError, RequestError
from .visible import shown

LARGEST = 2**63 - 1
"""Of an integer that reaches a tensor."""


FLOATS = {
    name: dtype
    for dtype, names in (
        (torch.bfloat16, ("bfloat16", "bf16")),
        (torch.float16, ("float16", "fp16")),
        (torch.float32, ("float32", "fp32")),
    )
    for name in names
}
"""Dtypes by the names that commands and `load_model` take."""


def names_of(*dtypes: torch.dtype) -> str:
    """Their names, for errors and help: bfloat16 (or bf16), float32 (or fp32)."""
    both = ([name for name, found in FLOATS.items() if found == dtype] for dtype in dtypes)
    return ", ".join(f"{long} (or {short})" for long, short in both)


def integer(name: str, value: Any, low: int = 1, high: int = LARGEST, expected: str = "") -> int:
    """The option `name` as an int: a Python, numpy or torch integer. A bool, 2.0 and "2" are none.

    Args:
        expected: words for the error; default: the range.

    Raises:
        RequestError: no integer, or one that is not low .. high.
    """
    found = as_integer(value)
    if found is not None and low <= found <= high:
        return found
    bounds = f"{low} .. {'2^63 - 1' if high == LARGEST else high}"
    raise RequestError(
        f"{name} is no integer" if found is None else f"{name} is out of range",
        got=f"{name}={shown(value)}",
        expected=expected or f"an integer, {bounds}",
        remedy=f"give {name} as an int within this range",
    )


def number(name: str, value: Any, low: float, high: float, expected: str, above: bool = False) -> float:
    """The option `name` as a finite float: any real number (a fraction, a numpy or torch scalar). A bool is none.

    Args:
        low, high: it is low .. high; above: it is more than low.
        expected: words for the error.

    Raises:
        RequestError: no finite number, or one out of range.
    """
    found = as_float(value)
    if found is not None and low <= found <= high and not (above and found == low):
        return found
    raise RequestError(
        f"{name} is no finite number" if found is None else f"{name} is out of range",
        got=f"{name}={shown(value)}",
        expected=expected,
        remedy=f"give {name} as a float within this range",
    )


def switch(name: str, value: Any) -> bool:
    """The option `name` as a bool.

    Raises:
        RequestError: something else.
    """
    if isinstance(value, bool):
        return value
    raise RequestError(
        f"{name} is no bool", got=f"{name}={shown(value)}", expected="True or False", remedy=f"give {name} as a bool"
    )


def as_integer(value: Any) -> int | None:
    """The int that a scalar stands for; None: it is no integer."""
    if type(value) is int:
        return value
    if isinstance(value, (bool, np.bool_)) or (
        isinstance(value, Tensor) and (value.dim() > 0 or value.dtype == torch.bool)
    ):
        return None
    try:
        return operator.index(value)
    except Exception:  # whatever a foreign __index__ raises
        return None


def is_size(value: Any) -> bool:
    """Whether an integer of any kind: also one that torch.compile keeps symbolic."""
    if isinstance(value, int):
        return not isinstance(value, bool)
    return isinstance(value, torch.SymInt) or as_integer(value) is not None


def seconds(name: str, value: Any) -> float:
    """The time that `name` waits, as a float.

    Raises:
        ContractError: no finite number above 0, or more than 30 years.
    """
    found = as_float(value)
    if found is None or not 0 < found < 1e9:
        raise ContractError(
            f"{name} is no time to wait", got=f"{name}={shown(value)}", expected="seconds, above 0 and below 1e9"
        )
    return found


def as_float(value: Any) -> float | None:
    """The finite float that a scalar stands for; None: it is no finite number."""
    if isinstance(value, bool):
        return None
    if isinstance(value, Tensor):
        real = value.dim() == 0 and value.dtype != torch.bool and not value.is_complex()
    else:
        real = isinstance(value, numbers.Real)
    try:
        found = float(value) if real else None
    except Exception:  # 10**400, or whatever a foreign __float__ raises
        return None
    return found if found is not None and abs(found) < float("inf") else None
