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

from ..backend import store
from ..contract import Routing
from ..errors import BackendUnavailable, ContractError
from .layout import Weights
from .run import grouped_matmul
from .tiles import BLOCK_K, BLOCK_N, columns_of_block, rows_of_tile

ENV = "TTNN_MOE_ASCEND_KERNELS"


def asked_for() -> bool:
    """Whether the environment asks for this path.

    Raises:
        ContractError: TTNN_MOE_ASCEND_KERNELS is neither "operators" nor "triton".
    """
    value = os.environ.get(ENV) or "operators"
    if value not in ("operators", "triton"):
        raise ContractError(f"{ENV} is not a path", got=repr(value), expected="operators or triton")
    return value == "triton"


def moe(npu: Any, hidden: Tensor, routing: Routing, weights: Weights, out: Tensor, accumulate: bool) -> None:
    """As run.moe."""
    if routing.T == 0:
        return
    T, K, H = routing.T, routing.K, hidden.shape[1]
    view = routing.sorted
    expert_out = experts(npu, hidden, view.expert_offsets[1:].long(), weights, view.pairs // K)
    total = torch.empty(T, H, dtype=torch.float32 if accumulate else out.dtype, device=out.device)
    (_, combine), (_, vector) = _kernels(), cores(hidden.device)
    block = columns_of_block(H)
    combine[(vector,)](expert_out, view.inverse, routing.topk_weights, total, T, H, K=K, BLOCK_H=block)
    store(total, out, accumulate, routing.num_tokens)


def experts(npu: Any, hidden: Tensor, ends: Tensor, weights: Weights, tokens: Tensor | None = None) -> Tensor:
    """As run.experts. tokens: [rows] int32, the row of hidden behind each sorted row; absent: hidden is sorted."""
    if tokens is None:
        tokens = torch.arange(len(hidden), dtype=torch.int32, device=hidden.device)
    H, I, rows = hidden.shape[1], weights.down.shape[1], len(tokens)
    block = rows_of_tile(rows, len(ends))
    tiles, num_tiles = tiles_of(ends, rows, block)
    act = hidden.new_empty(rows, I)  # of rows past the last end, which are in no tile, nothing is written
    (gate_up, _), (cube, _) = _kernels(), cores(hidden.device)
    gate_up[(cube,)](
        hidden,
        weights.gate_up.transpose(1, 2),
        ends.int(),
        tokens,
        tiles,
        num_tiles,
        act,
        H,
        I,
        BLOCK_M=block,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        CAST=hidden.device.type == "cpu",
    )
    return grouped_matmul(npu, act, weights.down, ends)


def tiles_of(ends: Tensor, rows: int, block: int) -> tuple[Tensor, Tensor]:
    """(expert, first row) of each tile of `block` rows, [bound, 2] int32, and how many there are, [1] int32.

    ends: [E] int64, where each expert's rows end.
    """
    E = len(ends)
    count = ends.diff(prepend=ends.new_zeros(1))
    of_expert = (count + block - 1) // block
    last = of_expert.cumsum(0)
    tile = torch.arange(rows // block + min(E, rows), device=ends.device)
    expert = torch.searchsorted(last, tile, right=True).clamp_max(E - 1)
    first = (ends - count)[expert] + (tile - (last - of_expert)[expert]) * block
    return torch.stack([expert, first], 1).int(), last[-1:].int()


def cores(device: torch.device) -> tuple[int, int]:
    """Cube and vector cores of the chip; of the interpreter, some."""
    if device.type == "cpu":
        return 2, 2
    from triton.runtime.driver import driver

    found = driver.active.utils.get_device_properties(device.index or 0)
    return found["num_aicore"], found["num_vectorcore"]


@cache
def _kernels() -> tuple[Any, Any]:
    try:
        from ttnn_moe.gpu_kernels.ascend.combine import combine
        from ttnn_moe.gpu_kernels.ascend.gate_up import gate_up
    except ImportError as error:
        raise BackendUnavailable(
            f"{ENV}=triton needs Triton, and it does not load: {error}",
            remedy=f"pip install triton-ascend, or unset {ENV}",
        ) from error
    return gate_up, combine
