"""Tiles of the Triton kernels of gpu_kernels/ascend, chosen from sizes that the host knows.

Every tile fits the buffers of a 910B3 with double buffering: bishengir-compile plans the memory of each
(make test-ascend-triton). The unified buffer holds 192 KiB. gate_up fills it above BLOCK_M * BLOCK_N = 8,192 (fp32 sums
of gate and of up), combine above BLOCK_H = 8,192 (14 bytes an element, two of each buffer included).
"""

from __future__ import annotations

from ..sizes import ceil_div, power_of_2

BLOCKS_M = (16, 32, 64)
BLOCK_N, BLOCK_K = 128, 64
BLOCKS_H = (2048, 4096, 8192)


def rows_of_tile(rows: int, E: int) -> int:
    """BLOCK_M of gate_up: the least of BLOCKS_M that holds an expert's share of so many sorted rows."""
    share = ceil_div(rows, max(E, 1))
    return next((block for block in BLOCKS_M if block >= share), BLOCKS_M[-1])


def columns_of_block(H: int) -> int:
    """BLOCK_H of combine: the least of BLOCKS_H that holds a row of H elements, or the largest."""
    return min(max(power_of_2(H), BLOCKS_H[0]), BLOCKS_H[-1])
