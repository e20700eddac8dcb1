"""Expert weight formats. A format is one object in FORMATS; nothing else in the package names it.

A format checks its tensors, gives back logical weights, and selects the experts of one device. Oracles use logical
weights, and so do backends without a native path.
"""

from __future__ import annotations

from ..errors import ContractError
from ..visible import shown
from .dense import DenseFormat
from .format import ExpertFormat, ExpertWeights, check_sizes
from .int4_24 import Int4_24Format
from .mxfp4 import Mxfp4Format
from .mxfp4_boxes import Mxfp4BoxesFormat

__all__ = [
    "FORMATS",
    "DenseFormat",
    "ExpertFormat",
    "ExpertWeights",
    "Int4_24Format",
    "Mxfp4BoxesFormat",
    "Mxfp4Format",
    "check_sizes",
    "get_format",
    "register_format",
]

FORMATS: dict[str, ExpertFormat] = {}


def register_format(fmt: ExpertFormat) -> None:
    """Add a weight format, or replace the one of the same name. Raises ContractError for what has no name."""
    if isinstance(fmt, type) or not isinstance(getattr(fmt, "name", None), str):
        raise ContractError("no expert weight format", got=shown(fmt), expected="a ttnn_moe.formats.ExpertFormat")
    FORMATS[fmt.name] = fmt


def get_format(name: str) -> ExpertFormat:
    """The format of that name. Raises ContractError, listing the known ones."""
    if not isinstance(name, str) or name not in FORMATS:
        raise ContractError("unknown expert weight format", got=repr(name), expected=f"one of {sorted(FORMATS)}")
    return FORMATS[name]


register_format(DenseFormat())
register_format(Int4_24Format())
register_format(Mxfp4Format())
register_format(Mxfp4BoxesFormat())
