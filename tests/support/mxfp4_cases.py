"""MXFP4 layers: those of gpt-oss beside plain ones, drawn or made of other experts."""

from __future__ import annotations

from dataclasses import replace

import torch

from ttnn_moe import Experts
from ttnn_moe.activations import CLAMPED_SWIGLU
from ttnn_moe.selfcheck.edges import Inputs


def interleaved(experts: Experts) -> Experts:
    """The same experts, with gate and up rows that alternate."""
    mixed = {
        name: torch.stack(tensor.chunk(2, 1), 2).flatten(1, 2) if name.startswith("gate_up") else tensor
        for name, tensor in experts.tensors.items()
    }
    return replace(experts, tensors=mixed, gate_up_order="interleaved")


def as_gpt_oss(experts: Experts, bias_dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Experts:
    """The same weights, with biases and the clamped SwiGLU. About one gate in ten is cut, and one up in five."""
    g = torch.Generator(experts.device).manual_seed(seed)
    E, H, I = experts.sizes
    biases = {
        name: (torch.randn(E, rows, generator=g, device=experts.device) * size).to(bias_dtype)
        for name, rows, size in (("gate_up_bias", 2 * I, 5.5), ("down_bias", H, 1.0))
    }
    return replace(experts, tensors={**experts.tensors, **biases}, activation=CLAMPED_SWIGLU)


def spoil_idle(x: Inputs) -> None:
    """NaN in everything of the experts that no token names."""
    idle = [e for e in range(x.experts.E) if not bool((x.counted_ids == e).any())]
    for name, tensor in x.experts.tensors.items():
        if not name.endswith("blocks"):
            tensor[idle] = 0xFF if name.endswith("scales") else torch.nan
