"""The layer as a chain of torch_npu's operators.

npu_moe_init_routing_v2 -> npu_grouped_matmul -> npu_swiglu -> npu_grouped_matmul -> npu_moe_token_unpermute. Ids
stay on the device, shapes follow from T and K, and nothing waits for the NPU.

Pairs that name no expert are sorted first, as an expert of their own in front of the others. npu_grouped_matmul wants
its groups to cover every row, so they go through the first expert's weights; what comes out is set to zero.
Groups are given as running sums, not as counts: counts of length 1 (one local expert) are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..contract import Routing
from .layout import Weights
from .operators import MATMUL, ROUTE, SWIGLU, UNPERMUTE


def routing_options(T: int, K: int, E: int) -> dict[str, Any]:
    """Options of npu_moe_init_routing_v2 for E experts and, in front of them, "no expert"."""
    return {
        "active_num": T * K,
        "expert_num": E + 1,
        "drop_pad_mode": 0,
        "expert_tokens_num_type": 1,  # counts
        "expert_tokens_num_flag": True,
        "quant_mode": -1,
        "active_expert_range": [0, E + 1],
        "row_idx_type": 0,  # for each pair, its sorted row
    }


MATMUL_OPTIONS: dict[str, Any] = {"split_item": 2, "group_type": 0, "group_list_type": 0}


def moe(npu: Any, hidden: Tensor, routing: Routing, weights: Weights, out: Tensor, accumulate: bool) -> None:
    """Write, or add, the layer's result to out [T, H].

    Args:
        npu: torch_npu, or what stands for it.
        hidden: [T, H] contiguous. routing: ids of the experts in weights.
        out: [T, H] in the dtype of hidden or fp32.
    """
    T, K = routing.T, routing.K
    if T == 0:
        return
    ids = routing.ids
    rows, row_of_pair, counts, _ = npu.npu_moe_init_routing_v2(hidden, ids + 1, **routing_options(T, K, weights.E))
    ends = counts.cumsum(0)[1:]
    both = grouped_matmul(npu, rows, weights.gate_up, ends)
    expert_out = grouped_matmul(npu, npu.npu_swiglu(both, dim=-1), weights.down, ends)
    # not by a weight of zero: zero times NaN is NaN
    none = torch.arange(T * K, device=ids.device) < counts[0]
    expert_out.masked_fill_(none[:, None], 0)
    probs = torch.where(ids < 0, 0.0, routing.topk_weights)
    if accumulate or out.dtype != expert_out.dtype:
        expert_out = expert_out.float()
    total = npu.npu_moe_token_unpermute(expert_out, row_of_pair, probs=probs)
    write(total, out, accumulate, routing.num_tokens)


def grouped_matmul(npu: Any, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """[rows, N]: rows [rows, inner] of each group through its weight [E, inner, N]; ends [E] int64, running sums."""
    return npu.npu_grouped_matmul([rows], [weight], group_list=ends, **MATMUL_OPTIONS)[0]


def write(total: Tensor, out: Tensor, accumulate: bool, num_tokens: Tensor | None) -> None:
    """Store a result, or add it in fp32; rows from num_tokens on are left as they are."""
    if accumulate:
        total = total.float() + out
    if num_tokens is not None:
        true = torch.arange(len(out), device=out.device) < num_tokens
        total = torch.where(true[:, None], total.to(out.dtype), out)
    out.copy_(total)


def calls(T: int, E: int, K: int, H: int, I: int, dtype: torch.dtype, wide: bool) -> list[tuple[str, dict[str, Any]]]:
    """What `moe` will call, in order, with meta tensors: for the check before the first launch.

    wide: the result is fp32, or is added.
    """

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    pairs = T * K
    ends = empty(E, dtype=torch.int64)
    gate_up, down = empty(E, 2 * I, H).transpose(1, 2), empty(E, H, I).transpose(1, 2)
    unpermuted = empty(pairs, H, dtype=torch.float32 if wide else dtype)
    return [
        (ROUTE, {"x": empty(T, H), "expert_idx": empty(T, K, dtype=torch.int32), **routing_options(T, K, E)}),
        (MATMUL, {"x": [empty(pairs, H)], "weight": [gate_up], "group_list": ends, **MATMUL_OPTIONS}),
        (SWIGLU, {"input": empty(pairs, 2 * I), "dim": -1}),
        (MATMUL, {"x": [empty(pairs, I)], "weight": [down], "group_list": ends, **MATMUL_OPTIONS}),
        (
            UNPERMUTE,
            {
                "permuted_tokens": unpermuted,
                "sorted_indices": empty(pairs, dtype=torch.int32),
                "probs": empty(T, K, dtype=torch.float32),
            },
        ),
    ]
