"""What a weight format must offer, and what it may read of an Experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor


class ExpertWeights(Protocol):
    """The weights of one layer, as a format sees them: sizes, named tensors, order of gate and up rows."""

    @property
    def E(self) -> int: ...
    @property
    def H(self) -> int: ...
    @property
    def I(self) -> int: ...
    @property
    def tensors(self) -> Mapping[str, Tensor]: ...
    @property
    def gate_up_order(self) -> str: ...


class ExpertFormat(Protocol):
    """One way to hold expert weights."""

    name: str

    def check(self, experts: ExpertWeights) -> None:
        """Raise ContractError unless the tensors have this format's names, shapes and dtypes."""

    def dequantize(self, experts: ExpertWeights, e: int) -> tuple[Tensor, Tensor]:
        """Logical weights of expert e: gate_up [2I, H] (gate rows first) and down [H, I]."""

    def select(self, experts: ExpertWeights, index: Tensor) -> dict[str, Tensor]:
        """The tensors of the experts in index [E_local] (int64, CPU); views where they can be."""
