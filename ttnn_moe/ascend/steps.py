"""The layer's separate steps, on the rows of `Routing.step_layout`: for comparing backends step by step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..contract import Routing, StepLayout
from .run import grouped_matmul, write


def project(npu: Any, hidden: Tensor, layout: StepLayout, weight: Tensor) -> Tensor:
    """[capacity, N]: the token of each row through its expert's weight [E, H, N]."""
    rows = hidden.index_select(0, layout.row_tokens.clamp_min(0))
    return grouped_matmul(npu, rows, weight, _ends(layout))


def silu_mul(npu: Any, gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [rows, I]; the operator refuses empty tensors."""
    return npu.npu_swiglu(torch.cat([gate, up], -1), dim=-1) if gate.numel() else torch.empty_like(gate)


def down_projection(
    npu: Any, activations: Tensor, routing: Routing, layout: StepLayout, weight: Tensor, out: Tensor, accumulate: bool
) -> None:
    """activations [capacity, I] through weight [E, I, H], weighed and summed in fp32 over ascending k."""
    expert_out = grouped_matmul(npu, activations, weight, _ends(layout))
    # npu_moe_token_unpermute wants every row named once; here some rows are padding
    total = out.new_zeros(out.shape, dtype=torch.float32)
    for k in range(routing.K):
        row, here = layout.inverse[:, k], layout.inverse[:, k, None] >= 0
        part = expert_out.index_select(0, row.clamp_min(0)).float() * layout.weights[:, k, None]
        total += torch.where(here, part, 0.0)
    write(total, out, accumulate, routing.num_tokens)


def _ends(layout: StepLayout) -> Tensor:
    """[E] int64: where each expert's rows end; the last takes what is left of the capacity."""
    last = torch.full((1,), layout.capacity, dtype=torch.int64, device=layout.row_start.device)
    return torch.cat([layout.row_start[1:-1].long(), last])
