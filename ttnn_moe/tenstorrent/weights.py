"""The order in which the tiles of an expert weight lie in DRAM.

A matrix of all experts of a device is a line of tiles: expert by expert, column by column, k by k. A core reads a
stretch of that line. So `run` tiles of the line lie side by side in one DRAM bank, and one NoC packet moves them.
The next `run` tiles lie in the next bank. device_kernels/common/weights.hpp has the same rule.

`run` is what fits a packet of 8 KiB: 4 tiles of bfloat16, 7 of bfloat8_b, 14 of bfloat4_b (cpp/planner, weight_run).
By bank, `run` is the part of an expert that a bank gets: the same part of every expert lies in the same bank.

A tensor in this order has the line's shape, [E, N / 32, K, 32]. Plain matrices, [E, K, N], are refused. The
typed operations (cpp/ttnn_ops) take gate, up and down weights in this form.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 32
LAYOUT = 2  # of tiles that are kept on disk


def line_of_page(tiles: int, banks: int, run: int) -> Tensor:
    """Which tile of the line each page of the tensor holds, [tiles] int64.

    Pages go round the banks. The last tiles, fewer than banks * run, lie one a bank.
    """
    grouped = tiles // (banks * run) * (banks * run)
    page = torch.arange(grouped)
    place, bank = page // banks, page % banks
    line = ((place // run) * banks + bank) * run + place % run
    return torch.cat([line, torch.arange(grouped, tiles)])


def in_bank_order(matrices: Tensor, devices: int, banks: int, run: int) -> Tensor:
    """Experts' matrices [E, K, N] as [E, N / 32, K, 32]: the tiles of E / devices experts of a device, by page."""
    E, K, N = matrices.shape
    rows, columns = K // TILE, N // TILE
    tiles = matrices.reshape(devices, E // devices, rows, TILE, columns, TILE)
    line = tiles.permute(0, 1, 4, 2, 3, 5).reshape(devices, -1, TILE, TILE)  # by expert, column, k
    pages = line[:, line_of_page(line.shape[1], banks, run).to(line.device)]
    return pages.reshape(E, columns, K, TILE)
