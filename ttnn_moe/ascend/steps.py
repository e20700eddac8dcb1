"""The layer's separate steps, on the rows of `Routing.step_layout`: for comparing backends step by step.

Unlike the whole layer they run operators on the AI CPU: `step_layout` sorts integers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backend import store
from ..contract import Routing, StepLayout
from .run import grouped_matmul


def project(npu: Any, hidden: Tensor, layout: StepLayout, weight: Tensor) -> Tensor:
    """[capacity, N]: the token of each row through its expert's weight [E, H, N]."""
    rows = hidden.index_select(0, layout.row_tokens.clamp_min(0))
    return grouped_matmul(npu, rows, weight, layout.row_start.diff().long())


def silu_mul(npu: Any, gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [rows, I]; the operator refuses empty tensors."""
    return npu.npu_swiglu(torch.cat([gate, up], -1), dim=-1) if gate.numel() else torch.empty_like(gate)


def down_projection(
    npu: Any, activations: Tensor, routing: Routing, layout: StepLayout, weight: Tensor, out: Tensor, accumulate: bool
) -> None:
    """activations [capacity, I] through weight [E, I, H], weighed and summed in fp32 over ascending k."""
    expert_out = grouped_matmul(npu, activations, weight, layout.row_start.diff().long())
    # npu_moe_token_unpermute wants every row named once; here some rows are padding
    total = out.new_zeros(out.shape, dtype=torch.float32)
    for k in range(routing.K):
        row = layout.inverse[:, k]
        part = expert_out.index_select(0, row.clamp_min(0)).float() * layout.weights[:, k, None]
        total += part.masked_fill_((row < 0)[:, None], 0)
    store(total, out, accumulate, routing.num_tokens)
