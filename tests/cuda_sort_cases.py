"""Cases of the routing sort kernels; on a GPU, or through Triton's interpreter (see test_cuda_kernels.py)."""

from __future__ import annotations

import random

import pytest
import torch
from cases import INTERPRETED

from ttnn_moe import Routing
from ttnn_moe.cuda import launch
from ttnn_moe.cuda.tiles import Gemm, Sorted

DEVICE = "cpu" if INTERPRETED else "cuda"
TILE = Gemm(32, 32, 4, 2)


def _tiles(offsets: list[int], m: int) -> list[list[int]]:
    return [[e, row] for e in range(len(offsets) - 1) for row in range(offsets[e], offsets[e + 1], m)]


@pytest.mark.parametrize("seed", range(12 if INTERPRETED else 100))
def test_sort(seed: int) -> None:
    rng = random.Random(seed)
    T, K = rng.choice([1, 7, 33, 150, 150 if INTERPRETED else 5000]), rng.choice([1, 2, 8, 16])
    E = rng.choice([1, 2, 6, 32, 40 if INTERPRETED else 1000])
    chunk, m = rng.choice([128, 512, 4096]), rng.choice([16, 128])
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(-2, E + 2, (T, K), generator=g)
    if rng.random() < 0.3:
        ids[torch.rand(T, K, generator=g) < 0.8] = rng.randrange(E)
    if rng.random() < 0.5:
        ids = ids.int()
    local = torch.randperm(E, generator=g) if rng.random() < 0.5 else None
    if local is not None:
        local = torch.where(local < (E + 1) // 2, local, -1).int()
    bound = rng.randrange(T + 1) if rng.random() < 0.3 else None
    count = E if local is None else (E + 1) // 2

    expert = torch.where((ids >= 0) & (ids < E), ids, -1).long()
    if local is not None:
        expert = torch.where(expert >= 0, local.long()[expert.clamp_min(0)], -1)
    if bound is not None:
        expert[bound:] = -1
    flat = expert.flatten()
    order = torch.argsort(torch.where(flat < 0, count, flat), stable=True)[: int((flat >= 0).sum())]
    inverse = torch.full_like(flat, -1)
    inverse[order] = torch.arange(len(order))
    offsets = [0, *torch.bincount(flat[flat >= 0], minlength=count).cumsum(0).tolist()]

    weights = torch.rand(T, K, generator=g)
    num_tokens = None if bound is None else torch.tensor(bound, dtype=torch.int32, device=DEVICE)
    routing = Routing.from_topk(ids.to(DEVICE), weights.to(DEVICE), E, num_tokens=num_tokens)
    selection = launch.Selection.of(routing, None if local is None else local.to(DEVICE))
    rows = launch.sort(selection, count, Sorted(m, TILE, TILE, sort_chunk=chunk))

    assert rows.offsets[: count + 1].tolist() == offsets
    assert rows.row_tokens[: len(order)].tolist() == (order // K).tolist()
    assert rows.inverse[: T * K].tolist() == inverse.tolist()
    tiles = _tiles(offsets, m)
    assert int(rows.num_tiles[0]) == len(tiles) <= rows.tiles_bound
    assert rows.tiles[: 2 * len(tiles)].view(-1, 2).tolist() == tiles
