"""The layer as a chain of torch_npu's operators.

npu_moe_init_routing_v2 -> npu_grouped_matmul -> npu_swiglu -> npu_grouped_matmul -> npu_moe_token_unpermute. Ids
stay on the device, shapes follow from T and K, and nothing waits for the NPU.

Pairs that name no expert are sorted last, as one more expert. The groups of npu_grouped_matmul end before them, and it
does not write rows past the last group. CANN's page (ops-transformer, gmm/grouped_matmul/README.md) allows a last end
below the number of rows. Groups are running sums, not counts: the operator refuses counts of length 1 (one local
expert).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backend import store
from ..contract import Routing
from .layout import Weights
from .operators import MATMUL, ROUTE, SWIGLU, UNPERMUTE


def routing_options(T: int, K: int, E: int) -> dict[str, Any]:
    """Options of npu_moe_init_routing_v2 for E experts and, after them, "no expert"."""
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
    none = routing.ids < 0
    ids = torch.where(none, weights.E, routing.ids)
    rows, row_of_pair, counts, _ = npu.npu_moe_init_routing_v2(hidden, ids, **routing_options(T, K, weights.E))
    ends = counts[:-1].cumsum(0)
    expert_out = experts(npu, rows, ends, weights)
    # what was not written may be NaN, and a weight of zero times NaN is NaN
    unwritten = torch.arange(T * K, device=ids.device) >= ends[-1]
    expert_out.masked_fill_(unwritten[:, None], 0)
    probs = torch.where(none, 0.0, routing.topk_weights)
    if accumulate or out.dtype != expert_out.dtype:
        expert_out = expert_out.float()
    total = npu.npu_moe_token_unpermute(expert_out, row_of_pair, probs=probs)
    store(total, out, accumulate, routing.num_tokens)


def experts(npu: Any, rows: Tensor, ends: Tensor, weights: Weights) -> Tensor:
    """[rows, H]: rows [rows, H], sorted by expert, each through its expert; those past the last end are undefined.

    ends: [E] int64, where each expert's rows end.
    """
    both = grouped_matmul(npu, rows, weights.gate_up, ends)
    return grouped_matmul(npu, npu.npu_swiglu(both, dim=-1), weights.down, ends)


def grouped_matmul(npu: Any, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """[rows, N]: rows [rows, inner] of each group through its weight [E, inner, N]; ends as in `experts`."""
    return npu.npu_grouped_matmul([rows], [weight], group_list=ends, **MATMUL_OPTIONS)[0]


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
