"""Cases of the contract with weights of another format: those of the case, quantised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .. import arranging
from ..activations import CLAMPED_SWIGLU
from ..contract import Experts
from ..errors import ContractError
from ..formats import int4_24, mxfp4, mxfp4_boxes, quantise_int4_24, quantise_mxfp4
from .edges import Case, Inputs

_QUANTISE: dict[str, Callable[[Experts], Experts]] = {
    int4_24.NAME: quantise_int4_24.quantise_experts,
    mxfp4.NAME: quantise_mxfp4.quantise_experts,
    mxfp4_boxes.NAME: lambda dense: arranging.arrange(quantise_mxfp4.quantise_experts(dense)),
}
DENSE = "dense"


def known(weight_format: str) -> None:
    """Raise ContractError unless cases can be made in that format."""
    if weight_format not in (DENSE, *_QUANTISE):
        raise ContractError("no cases of this format", got=weight_format, expected=[DENSE, *_QUANTISE])


def case_in(weight_format: str, case: Case) -> Case:
    """The case, at sizes that the format has."""
    if weight_format == DENSE:
        return case
    least = 64 if weight_format == int4_24.NAME else mxfp4.GROUP
    return replace(case, H=-(-case.H // least) * least, I=-(-case.I // least) * least)


def experts_in(weight_format: str, dense: Experts) -> Experts:
    """Dense experts in a format, quantised where they are; an expert whose weights are NaN has NaN for its scales."""
    if weight_format == DENSE:
        return dense
    spoiled = next(iter(dense.tensors.values())).isnan().flatten(1).any(1).nonzero().flatten().tolist()
    if spoiled:
        dense = replace(dense, tensors={name: tensor.nan_to_num() for name, tensor in dense.tensors.items()})
    experts = _QUANTISE[weight_format](dense)
    for e in spoiled:
        _spoil(experts, e)
    return experts


def as_gpt_oss(x: Inputs) -> Inputs:
    """The same call with the activation and the order of rows of gpt-oss, and with biases."""
    boxes = x.experts.format == mxfp4_boxes.NAME
    experts, g = arranging.restored(x.experts) if boxes else x.experts, torch.Generator().manual_seed(0)
    E, H, I = experts.sizes

    def bias(rows: int, size: float) -> Tensor:
        return (torch.randn(E, rows, generator=g) * size).to(experts.device, torch.bfloat16)

    tensors = {
        name: torch.stack(tensor.chunk(2, 1), 2).flatten(1, 2) if name.startswith("gate_up") else tensor
        for name, tensor in experts.tensors.items()
    }
    tensors |= {"gate_up_bias": bias(2 * I, 5.0), "down_bias": bias(H, 1.0)}
    made = replace(experts, tensors=tensors, gate_up_order="interleaved", activation=CLAMPED_SWIGLU)
    return replace(x, experts=arranging.arrange(made) if boxes else made)


def _spoil(experts: Experts, e: int) -> None:
    for name, tensor in experts.tensors.items():
        if experts.format == int4_24.NAME:
            tensor[e] |= 0x7FC0 << 48
        elif name.endswith("scales"):
            tensor[e] = 0xFF
