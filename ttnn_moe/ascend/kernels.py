"""The second path: the Triton kernels of gpu_kernels/ascend, with npu_grouped_matmul for the down projection.

Asked for by TTNN_MOE_ASCEND_KERNELS=triton, with triton-ascend installed. Against the chain of operators it keeps
gate and up in fp32 until they are multiplied, and computes no activation of a pair that names no expert. Never run on
an NPU.
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
from .run import grouped_matmul, write

ENV = "TTNN_MOE_ASCEND_KERNELS"
BLOCK_M, BLOCK_N, BLOCK_K = 64, 128, 64
BLOCK_H = 2048


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
    gate_up, combine = _kernels()
    T, K, H = routing.T, routing.K, hidden.shape[1]
    I, pairs = weights.down.shape[1], routing.T * routing.K
    cube, vector = cores(hidden.device)
    view = routing.sorted
    tiles, num_tiles = tiles_of(view.expert_offsets, pairs)
    # rows past the last expert's are undefined in view.pairs, and in no tile
    act = hidden.new_zeros(pairs, I)
    gate_up[(cube,)](
        hidden, weights.gate_up.transpose(1, 2), view.expert_offsets[1:], view.pairs // K, tiles, num_tiles, act,
        H, I, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, CAST=hidden.device.type == "cpu",
    )  # fmt: skip
    ends = view.expert_offsets[1:].long()
    ends[-1:] = pairs  # the groups of npu_grouped_matmul cover every row
    expert_out = grouped_matmul(npu, act, weights.down, ends)
    total = torch.empty(T, H, dtype=torch.float32 if accumulate else out.dtype, device=out.device)
    combine[(vector,)](expert_out, view.inverse, routing.topk_weights, total, T, H, K=K, BLOCK_H=BLOCK_H)
    write(total, out, accumulate, routing.num_tokens)


def tiles_of(offsets: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """(expert, first row) of each tile of BLOCK_M rows, [bound, 2] int32, and how many there are, [1] int32.

    offsets: [E+1] int32, where each expert's rows start.
    """
    E = len(offsets) - 1
    of_expert = (offsets.diff() + BLOCK_M - 1) // BLOCK_M
    last = of_expert.cumsum(0)
    tile = torch.arange(pairs // BLOCK_M + min(E, pairs), device=offsets.device)
    expert = torch.searchsorted(last, tile, right=True).clamp_max(E - 1)
    first = offsets[expert] + (tile - (last - of_expert)[expert]) * BLOCK_M
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
        from gpu_kernels.ascend.combine import combine
        from gpu_kernels.ascend.gate_up import gate_up
    except ImportError as error:
        raise BackendUnavailable(
            f"{ENV}=triton needs Triton, and it does not load: {error}",
            remedy=f"pip install triton-ascend, or unset {ENV}",
        ) from error
    return gate_up, combine
