"""Cases of the routing sort kernels; on a GPU, or through Triton's interpreter (see test_cuda_kernels.py)."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from routing_draws import draw
from targets import INTERPRETED
from ttnn_moe import Routing
from ttnn_moe.cuda.moe import triton_launch
from ttnn_moe.cuda.moe.triton_tiles import SortedTiles, TritonTile

DEVICE = "cpu" if INTERPRETED else "cuda"
TILE = TritonTile(32, 32, 4, 2)


def _tiles(offsets: list[int], m: int) -> list[list[int]]:
    return [[e, row] for e in range(len(offsets) - 1) for row in range(offsets[e], offsets[e + 1], m)]


@pytest.mark.parametrize(("n", "true"), [(2**31 - 1, 9), (2**30, 9), (10, 9), (-1, 0), (-1431655765, 0), (-(2**31), 0)])
def test_any_num_tokens(n: int, true: int) -> None:
    """Above T as T, below 0 as 0, also where n * K has more than 32 bits."""
    T, K, E = 9, 3, 4
    ids = torch.randint(0, E, (T, K), dtype=torch.int32, device=DEVICE)
    bound = torch.tensor(n, dtype=torch.int32, device=DEVICE)
    routing = Routing.from_topk(ids, torch.rand(T, K).to(DEVICE), E, num_tokens=bound)
    sizes = SortedTiles(16, TILE, TILE, sort_chunk=128)
    words = torch.empty(triton_launch.sort_words(T * K, E, sizes), dtype=torch.int32, device=DEVICE)
    assert int(triton_launch.sort(routing, None, E, sizes, words).offsets[E]) == true * K


@pytest.mark.parametrize("seed", range(12 if INTERPRETED else 100))
def test_sort(seed: int) -> None:
    rng = random.Random(seed)
    T, K = rng.choice([1, 7, 33, 150, 150 if INTERPRETED else 5000]), rng.choice([1, 2, 8, 16])
    E = rng.choice([1, 2, 6, 32, 40 if INTERPRETED else 1000])
    chunk, m = rng.choice([128, 512, 4096]), rng.choice([16, 128])
    drawn = draw(seed, rng, T, E, K)
    ids, local, count, bound, order = drawn.ids, drawn.local, drawn.here, drawn.bound, drawn.order
    offsets = [0, *itertools.accumulate(drawn.counts)]

    weights = torch.rand(T, K)
    num_tokens = None if bound is None else torch.tensor(bound, dtype=torch.int32, device=DEVICE)
    routing = Routing.from_topk(ids.to(DEVICE), weights.to(DEVICE), E, num_tokens=num_tokens)
    expert_map = None if local is None else local.to(DEVICE)
    sizes = SortedTiles(m, TILE, TILE, sort_chunk=chunk)
    words = torch.empty(triton_launch.sort_words(T * K, count, sizes), dtype=torch.int32, device=DEVICE)
    rows = triton_launch.sort(routing, expert_map, count, sizes, words)

    assert rows.offsets[: count + 1].tolist() == offsets
    assert rows.row_tokens[: len(order)].tolist() == (order // K).tolist()
    assert rows.inverse[: T * K].tolist() == drawn.inverse.tolist()
    tiles = _tiles(offsets, m)
    assert int(rows.num_tiles[0]) == len(tiles) <= rows.tiles_bound
    assert rows.tiles[: 2 * len(tiles)].view(-1, 2).tolist() == tiles
