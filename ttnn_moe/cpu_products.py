"""Products of two-byte numbers on CPUs without instructions for them: fp32 products of a block of weights at a time.

torch's own products of bf16 and fp16 take up to six times as long as in fp32 there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# weights decoded or widened at a time: 2 MB of fp32 stay in the L2 cache until they are multiplied
BLOCK_WEIGHTS = 1 << 19

WIDENED_ROWS = 12
"""Rows from which fp32 products are faster on a CPU with AVX2 alone, the conversion of the weights included."""


def widens(dtype: torch.dtype, rows: int) -> bool:
    """Whether so many rows of that dtype are multiplied faster in fp32, on this CPU."""
    return dtype.itemsize == 2 and rows >= WIDENED_ROWS and torch.backends.cpu.get_cpu_capability() == "AVX2"


def multiply(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """out [T, N] = x [T, K] weight [N, K]^T + bias [N], on a CPU: fp32 products, rounded once."""
    N, K = weight.shape
    wide, block = x.float(), max(1, min(N, BLOCK_WEIGHTS // K))
    held = wide.new_empty(block, K)
    for start in range(0, N, block):
        some = slice(start, start + block)
        part = weight[some]
        product = wide @ held[: len(part)].copy_(part).t()
        if bias is not None:
            product += bias[some]
        out[:, some] = product


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] weight [N, K]^T + bias [N] -> [T, N], rounded once; on any device."""
    if torch.compiler.is_compiling() or x.device.type != "cpu" or not widens(x.dtype, len(x)):
        return F.linear(x, weight, bias)
    out = x.new_empty(len(x), len(weight))
    multiply(x, weight, out, bias)
    return out
