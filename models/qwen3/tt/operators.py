"""How many operators a decode step calls (views included), and the DRAM that traces of it take."""

from __future__ import annotations

from ..config import Qwen3MoeConfig
from .cache import MAX_ROWS

STEP = 8
"""Around the layers: three embeddings with a reshape each, last norm, head."""
ATTENTION = 19
"""Of a layer, with its norm and residual."""
EXPERTS = 17
"""Of a sparse layer: norm, router, our three programs, residual."""
SUM_OVER_DEVICES = 7
"""More of these on a mesh."""
DENSE = 7
"""Of a dense layer: norm, three linears, SiLU, product, residual."""

BYTES = 32 << 10
"""Bytes of an operator in a trace: commands, with the arguments of up to 130 cores. Estimated; never on silicon."""


def operators(config: Qwen3MoeConfig, D: int) -> int:
    """Operators of a decode step on a 1xD mesh, at most: Wormhole sums in bf16, and needs no typecast."""
    sparse = sum(config.is_sparse(i) for i in range(config.num_hidden_layers))
    dense = config.num_hidden_layers - sparse
    return (
        STEP
        + ATTENTION * config.num_hidden_layers
        + (EXPERTS + (SUM_OVER_DEVICES if D > 1 else 0)) * sparse
        + DENSE * dense
    )


def trace_bytes(config: Qwen3MoeConfig, D: int) -> int:
    """DRAM of each chip for the traces of every number of rows, 1, 2, 4 ... MAX_ROWS."""
    return operators(config, D) * BYTES * MAX_ROWS.bit_length()
