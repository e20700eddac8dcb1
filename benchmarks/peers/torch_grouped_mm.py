"""torch's grouped matrix product with as little around it as torch operators allow.

Sort the pairs by expert, gather, product, SiLU*mul, product; put the rows back in the order of the tokens; weigh and
sum over k as one batched product with fp32 accumulators. No host synchronisation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ttnn_moe.bench.implementations import Forward, Implementation
from ttnn_moe.bench.layer import Layer, Weights


def _product():  # type: ignore[no-untyped-def]
    return getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


class TorchGroupedMm(Implementation):
    """See the module's docstring."""

    name = "torch grouped_mm"
    weights_dtype = None

    def available(self, device: str) -> str | None:
        if _product() is None:
            return f"torch {torch.__version__} has no grouped_mm"
        if device == "cuda" and torch.cuda.get_device_capability() < (8, 0):
            return "grouped_mm needs sm_80 or newer"
        return None

    def why_not(self, layer: Layer, T: int) -> str | None:
        if layer.dtype != torch.bfloat16:
            return f"grouped_mm multiplies bf16 on CUDA, not {layer.dtype}"
        if layer.H % 8 or layer.I % 8:
            return f"grouped_mm needs rows of whole 16 bytes, not H={layer.H}, I={layer.I}"
        return None

    def prepare(self, layer: Layer, weights: Weights, T: int) -> Forward:
        product, E, K, H, I = _product(), layer.E, layer.K, layer.H, layer.I
        gate_up, down = weights.gate_up.mT, weights.down.mT
        bounds = torch.arange(E, dtype=torch.int32, device=gate_up.device)
        rows = torch.arange(T * K, device=gate_up.device)

        def call(hidden: Tensor, ids: Tensor, scale: Tensor) -> Tensor:
            experts, order = ids.flatten().sort()
            ends = torch.searchsorted(experts, bounds, right=True, out_int32=True)
            both = product(hidden[order // K], gate_up, offs=ends)
            out = product(torch.nn.functional.silu(both[:, :I]).mul_(both[:, I:]), down, offs=ends)
            inverse = torch.empty_like(order)
            inverse[order] = rows
            return torch.bmm(scale[:, None, :], out[inverse].view(T, K, H)).view(T, H)

        return call
