"""How many operators a decode step calls (views included), and the DRAM that traces of it take."""

from __future__ import annotations

from ttnn_moe.tenstorrent.all_reduce import summed_columns

from ..config import Qwen3MoeConfig
from .attention import TILE
from .cache import MAX_ROWS
from .sizes import share_of

STEP = 11
"""Around the layers: three embeddings with a reshape each, last norm, head, the largest logits."""
EMBEDDED = 1
"""More of the embedding on a mesh: all_gather."""
ATTENTION = 18
"""Of a layer, with its norm and residual; one more for B rows on fewer than 2 B cores."""
EXPERTS = 17
"""Of a sparse layer: norm, router, our three programs, residual."""
SUMMED_EXPERTS = 5
"""More of these on a mesh: views, reduce_scatter, typecast, all_gather."""
SUMMED_ATTENTION = 3
"""More of attention on a mesh: reduce_scatter, typecast, all_gather. A slice follows where H / D is no whole tiles."""
WIDENED = 2
"""More of attention where a chip has one key head and less than a tile of query heads: views."""
DENSE = 7
"""Of a dense layer: norm, three linears, SiLU, product, residual."""

BYTES = 32 << 10
"""Bytes of an operator in a trace: commands, with the arguments of up to 130 cores. Estimated; never on silicon."""


def operators(config: Qwen3MoeConfig, D: int) -> int:
    """Operators of a decode step on a 1xD mesh, at most: a simulated Wormhole sums in bf16, without casts."""
    sparse = sum(config.is_sparse(i) for i in range(config.num_hidden_layers))
    dense = config.num_hidden_layers - sparse
    share = share_of(config, D)
    step, experts = STEP, EXPERTS
    attention = ATTENTION + WIDENED * (share.kv_heads == 1 and share.heads < TILE)
    if D > 1:
        narrow = summed_columns(config.hidden_size, D) != config.hidden_size
        step += EMBEDDED + narrow
        attention += SUMMED_ATTENTION + narrow
        experts += SUMMED_EXPERTS + narrow
    return step + attention * config.num_hidden_layers + experts * sparse + DENSE * dense


def trace_bytes(config: Qwen3MoeConfig, D: int) -> int:
    """DRAM of each chip for the traces of every number of rows, 1, 2, 4 ... MAX_ROWS."""
    return operators(config, D) * BYTES * MAX_ROWS.bit_length()
