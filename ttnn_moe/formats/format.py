"""What a weight format must offer, and what it may read of an Experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from ..activations import SILU
from ..errors import ContractError
from ..sizes import ceil_div


class ExpertWeights(Protocol):
    """The weights of one layer, as a format sees them: sizes, named tensors, order of rows, activation."""

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
    @property
    def activation(self) -> str: ...


class ExpertFormat(Protocol):
    """One way to hold expert weights.

    Attributes:
        multiple: H and I are multiples of it.
    """

    name: str
    multiple: int

    def check(self, experts: ExpertWeights) -> None:
        """Raise ContractError unless the tensors have this format's names, shapes and dtypes."""

    def dequantize(self, experts: ExpertWeights, e: int) -> tuple[Tensor, Tensor]:
        """Logical weights of expert e: gate_up [2I, H] (gate rows first) and down [H, I]."""

    def select(self, experts: ExpertWeights, index: Tensor) -> dict[str, Tensor]:
        """The tensors of the experts in index [E_local] (int64, CPU); views where they can be."""


def check_sizes(fmt: ExpertFormat, H: int, I: int) -> None:
    """Raise ContractError unless experts of these sizes can have the format."""
    for size, n in (("H", H), ("I", I)):
        if n % fmt.multiple:
            raise ContractError(
                f"{size} does not fit {fmt.name} experts",
                got=n,
                expected=f"a multiple of {fmt.multiple}",
                remedy=f"pad {size} with zeros to {ceil_div(n, fmt.multiple) * fmt.multiple}, or use dense weights",
            )


def check_silu(name: str, experts: ExpertWeights) -> None:
    """Raise ContractError unless experts, of the format of that name, compute silu(gate) * up."""
    if experts.activation != SILU:
        raise ContractError(f"{name} experts have another activation", got=experts.activation, expected=SILU)


def select_experts(tensors: Mapping[str, Tensor], index: Tensor) -> dict[str, Tensor]:
    """The experts in index [E_local] (int64, CPU) of tensors [E, ...]; views where index is a contiguous run."""
    first, n = int(index[0]), len(index)
    if torch.equal(index, torch.arange(first, first + n, device=index.device)):
        return {name: tensor[first : first + n] for name, tensor in tensors.items()}
    return {name: tensor.index_select(0, index.to(tensor.device)) for name, tensor in tensors.items()}
