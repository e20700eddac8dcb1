"""One call on the GPU: the family and the plan of its sizes, its scratch, its launches."""

from __future__ import annotations

from functools import lru_cache

import torch

from ...accelerator import on
from ...contract import Problem
from ...errors import ContractError
from ...logs import logger
from ..arch import target_of
from .families import Chosen, choose
from .family import Call


@lru_cache(maxsize=4096)
def chosen_of(
    T: int,
    K: int,
    E: int,
    D: int,
    H: int,
    I: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    weight_format: str,
    gate_up_order: str,
    activation: str,
    biased: bool,
    fp16_scales: bool,
    device: torch.device,
    aligned: bool,
) -> Chosen:
    """What runs a call of these sizes; see Problem. To make a Problem takes longer than this look-up.

    Raises:
        ContractError: no family does, or TTNN_MOE_CUDA_ARCH names what the GPU does not run.
    """
    problem = Problem(
        T,
        E,
        K,
        H,
        I,
        dtype,
        out_dtype,
        weight_format=weight_format,
        gate_up_order=gate_up_order,
        device=device.type,
        D=D,
        activation=activation,
        biased=biased,
        fp16_scales=fp16_scales,
    )
    chosen = choose(problem, target_of(device), aligned=aligned)
    if isinstance(chosen, str):
        raise ContractError("no kernels run this problem", got=chosen)
    logger.debug("T={} E={} K={} H={} I={}: {}", T, E, K, H, I, chosen)
    return chosen


def chosen_for(call: Call) -> Chosen:
    """What runs a call: the sizes decide, and the alignment of the tensors."""
    hidden, routing, experts, out = call.hidden, call.routing, call.experts, call.out
    T, K = routing.topk_ids.shape
    E = routing.E
    sizes = T, K, E, E // experts.E, experts.H, experts.I
    form = experts.format, experts.gate_up_order, experts.activation, experts.biased, experts.fp16_scales
    kinds = hidden.dtype, out.dtype, *form, hidden.device
    chosen = chosen_of(*sizes, *kinds, True)
    alignment = chosen.family.alignment
    if alignment > 1:
        addresses = hidden.data_ptr() | out.data_ptr()
        for tensor in experts.tensors.values():
            addresses |= tensor.data_ptr()
        if addresses % alignment:
            return chosen_of(*sizes, *kinds, False)
    return chosen


def run(call: Call) -> None:
    """Write, or add, the operator's result to out [T, H]; T > 0. Scratch is allocated for this call."""
    chosen = chosen_for(call)
    device = call.hidden.device
    buffers = tuple(torch.empty(buffer.shape, dtype=buffer.dtype, device=device) for buffer in chosen.scratch)
    with on(device):
        chosen.family.launch(chosen.plan, call, buffers)
