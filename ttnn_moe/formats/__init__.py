"""Expert weight formats. A format is one object in FORMATS; nothing else in the package names it.

A format checks its tensors, gives back logical weights (for oracles and for backends that have no native path),
and cuts out the experts of one device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from ..errors import ContractError
from .dense import DenseFormat

if TYPE_CHECKING:
    from ..experts import Experts


class ExpertFormat(Protocol):
    """What a weight format must offer."""

    name: str

    def check(self, experts: Experts) -> None:
        """Raise ContractError unless the tensors have this format's names, shapes and dtypes."""

    def dequantize(self, experts: Experts, e: int) -> tuple[Tensor, Tensor]:
        """Logical weights of expert e: gate_up [2I, H] (gate rows first) and down [H, I]."""

    def select(self, experts: Experts, index: Tensor) -> dict[str, Tensor]:
        """The tensors of the experts in index [E_local] (int64, CPU); views where they can be."""


FORMATS: dict[str, ExpertFormat] = {}


def register_format(fmt: ExpertFormat) -> None:
    """Add a weight format, or replace the one of the same name."""
    FORMATS[fmt.name] = fmt


def get_format(name: str) -> ExpertFormat:
    """The format of that name. Raises ContractError, listing the known ones."""
    if name not in FORMATS:
        raise ContractError("unknown expert weight format", got=repr(name), expected=f"one of {sorted(FORMATS)}")
    return FORMATS[name]


register_format(DenseFormat())
