"""The layer as a chain of torch_npu's operators.

npu_moe_init_routing_v2 -> npu_grouped_matmul -> npu_swiglu -> npu_grouped_matmul -> npu_moe_token_unpermute. Ids
stay on the device, shapes follow from T and K, and nothing waits for the NPU: no value is copied from the host, and no
operator runs on the NPU's AI CPU.

Pairs that name no expert are sorted last, as one more expert. The groups of npu_grouped_matmul end before them, and it
does not write rows past the last group. CANN's page (ops-transformer, gmm/grouped_matmul/README.md) allows groups that
hold fewer rows than there are. Distinct ids name an expert each: there is no such expert, and all rows are written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..contract import Routing
from .layout import Weights
from .operators import MATMUL, ROUTE, SWIGLU, UNPERMUTE


def routing_options(T: int, K: int, E: int, none: bool = True) -> dict[str, Any]:
    """Options of npu_moe_init_routing_v2 for E experts and, with none, "no expert" after them."""
    E += none
    return {
        "active_num": T * K,
        "expert_num": E,
        "drop_pad_mode": 0,
        "expert_tokens_num_type": 1,  # counts; CANN 8.5's tiling (moe_init_routing_v3_tiling.cpp) has no running sums
        "expert_tokens_num_flag": True,
        "quant_mode": -1,
        "active_expert_range": [0, E],
        "row_idx_type": 0,  # for each pair, its sorted row
    }


def matmul_options(E: int) -> dict[str, Any]:
    """Options of npu_grouped_matmul for the rows that each of E experts has."""
    # it refuses counts of length 1; one count is its own running sum
    return {"split_item": 2, "group_type": 0, "group_list_type": 1 if E > 1 else 0}


def is_distinct(routing: Routing) -> bool:
    """Whether each pair names an expert: distinct ids, and T is no bound."""
    return routing.distinct and routing.num_tokens is None


def result(npu: Any, hidden: Tensor, routing: Routing, weights: Weights, wide: bool) -> Tensor:
    """As path.result, for T of at least 1."""
    distinct = is_distinct(routing)
    rows, row_of_pair, counts = route(npu, hidden, routing, weights.E)
    expert_out = experts(npu, rows, counts[: weights.E], weights)
    probs = routing.topk_weights
    if distinct:
        # an id that breaks the promise gets the row -1: then its token gets wrong numbers, from within the rows
        row_of_pair = row_of_pair.clamp_min(0)
    else:
        # what was not written may be NaN, and a weight of zero times NaN is NaN
        pair = torch.arange(len(rows), device=rows.device)
        expert_out.masked_fill_((pair >= len(rows) - counts[-1])[:, None], 0)
        probs = probs.masked_fill(routing.absent, 0)
    if wide:
        expert_out = expert_out.float()
    return npu.npu_moe_token_unpermute(expert_out, row_of_pair, probs=probs)  # type: ignore[no-any-return]


def route(npu: Any, hidden: Tensor, routing: Routing, E: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows sorted by expert [T*K, H], the row of each pair [T*K] int32, and how many each expert has, int64.

    There are E counts, and one more for "no expert" unless `is_distinct`.
    """
    none = not is_distinct(routing)
    ids = routing.ids_or(E) if none else routing.topk_ids.int()
    options = routing_options(routing.T, routing.K, E, none)
    return npu.npu_moe_init_routing_v2(hidden, ids, **options)[:3]  # type: ignore[no-any-return]


def experts(npu: Any, rows: Tensor, counts: Tensor, weights: Weights) -> Tensor:
    """As path.experts."""
    both = grouped_matmul(npu, rows, weights.gate_up, counts)
    return grouped_matmul(npu, npu.npu_swiglu(both, dim=-1), weights.down, counts)


def grouped_matmul(npu: Any, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """[rows, N]: rows [rows, inner] of each group through its weight [E, inner, N]; counts as in path.experts."""
    return npu.npu_grouped_matmul([rows], [weight], group_list=counts, **matmul_options(len(counts)))[0]


def calls(
    T: int, E: int, K: int, H: int, I: int, dtype: torch.dtype, wide: bool, distinct: bool = False
) -> list[tuple[str, dict[str, Any]]]:
    """What `result` will call, in order, with meta tensors: for the check before the first launch."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    pairs, routing = T * K, routing_options(T, K, E, not distinct)
    counts, options = empty(E, dtype=torch.int64), matmul_options(E)
    gate_up, down = empty(E, 2 * I, H).transpose(1, 2), empty(E, H, I).transpose(1, 2)
    unpermuted = empty(pairs, H, dtype=torch.float32 if wide else dtype)
    return [
        (ROUTE, {"x": empty(T, H), "expert_idx": empty(T, K, dtype=torch.int32), **routing}),
        (MATMUL, {"x": [empty(pairs, H)], "weight": [gate_up], "group_list": counts, **options}),
        (SWIGLU, {"input": empty(pairs, 2 * I), "dim": -1}),
        (MATMUL, {"x": [empty(pairs, I)], "weight": [down], "group_list": counts, **options}),
        (
            UNPERMUTE,
            {
                "permuted_tokens": unpermuted,
                "sorted_indices": empty(pairs, dtype=torch.int32),
                "probs": empty(T, K, dtype=torch.float32),
            },
        ),
    ]
