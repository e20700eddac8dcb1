"""The second path: the Triton kernels of gpu_kernels/ascend, with npu_grouped_matmul for the down projection.

TTNN_MOE_ASCEND_KERNELS=triton asks for it; triton-ascend must be installed. Unlike the chain of operators it keeps gate
and up in fp32 until their product. Never run on an NPU.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..contract import Routing
from ..errors import BackendUnavailable, ContractError
from .layout import Weights
from .run import grouped_matmul, is_distinct, route
from .tiles import BLOCK_K, BLOCK_N, columns_of_block, rows_of_tile

ENV = "TTNN_MOE_ASCEND_KERNELS"


def asked_for() -> bool:
    """Whether the environment asks for this path.

    Raises:
        ContractError: TTNN_MOE_ASCEND_KERNELS is neither "operators" nor "triton".
    """
    value = os.environ.get(ENV) or "operators"
    if value not in ("operators", "triton"):
        raise ContractError(
            f"{ENV} is not a path", got=repr(value), expected="operators or triton", remedy=f"unset {ENV}"
        )
    return value == "triton"


def result(npu: Any, hidden: Tensor, routing: Routing, weights: Weights, wide: bool) -> Tensor:
    """As path.result, for T of at least 1."""
    T, K, H = routing.T, routing.K, hidden.shape[1]
    rows, row_of_pair, counts = route(npu, hidden, routing, weights.E)
    expert_out = experts(npu, rows, counts[: weights.E], weights)
    inverse = row_of_pair.view(T, K)
    if not is_distinct(routing):
        inverse = inverse.masked_fill(routing.absent, -1)
    total = torch.empty(T, H, dtype=torch.float32 if wide else hidden.dtype, device=hidden.device)
    (_, combine), (_, vector) = load(), cores(hidden.device)
    block = columns_of_block(H)
    combine[(vector,)](expert_out, inverse, routing.topk_weights, total, T, H, K=K, BLOCK_H=block)
    return total


def experts(npu: Any, rows: Tensor, counts: Tensor, weights: Weights) -> Tensor:
    """As path.experts."""
    (n, H), I = rows.shape, weights.down.shape[1]
    block = rows_of_tile(n, len(counts))
    ends, tiles, num_tiles = tiles_of(counts, n, block)
    act = rows.new_empty(n, I)  # of rows of no expert, which are in no tile, nothing is written
    (gate_up, _), (cube, _) = load(), cores(rows.device)
    gate_up[(cube,)](
        rows,
        weights.gate_up.transpose(1, 2),
        ends,
        torch.arange(n, dtype=torch.int32, device=rows.device),
        tiles,
        num_tiles,
        act,
        H,
        I,
        BLOCK_M=block,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        CAST=rows.device.type == "cpu",
    )
    return grouped_matmul(npu, act, weights.down, counts)


def tiles_of(counts: Tensor, rows: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where each expert's rows end, [E] int32, and the tiles of `block` rows.

    A tile is (expert, first row), [bound, 2] int32; how many there are is [1] int32. int32 throughout: running sums
    and quotients of int64 run on the AI CPU.

    counts: [E] int64, how many of the sorted rows each expert has.
    """
    E, count = len(counts), counts.int()
    of_expert = (count + block - 1) // block
    ends, last = count.cumsum(0, dtype=torch.int32), of_expert.cumsum(0, dtype=torch.int32)
    tile = torch.arange(rows // block + min(E, rows), dtype=torch.int32, device=counts.device)
    expert = (tile[:, None] >= last).sum(1, dtype=torch.int32).clamp_max(E - 1)
    row, before = (ends - count).index_select(0, expert), (last - of_expert).index_select(0, expert)
    return ends, torch.stack([expert, row + (tile - before) * block], 1), last[-1:]


def cores(device: torch.device) -> tuple[int, int]:
    """Cube and vector cores of the chip; of the interpreter, some."""
    if device.type == "cpu":
        return 2, 2
    from triton.runtime.driver import driver

    found = driver.active.utils.get_device_properties(device.index or 0)
    return found["num_aicore"], found["num_vectorcore"]


@cache
def load() -> tuple[Any, Any]:
    """The two kernels, gate_up and combine.

    Raises:
        BackendUnavailable: Triton does not load.
    """
    try:
        from ttnn_moe.gpu_kernels.ascend.combine import combine
        from ttnn_moe.gpu_kernels.ascend.gate_up import gate_up
    except ImportError as error:
        raise BackendUnavailable(
            f"{ENV}=triton needs Triton, and it does not load: {error}",
            remedy=f"pip install triton-ascend, or unset {ENV}",
        ) from error
    return gate_up, combine
