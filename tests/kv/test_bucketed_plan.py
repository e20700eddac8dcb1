"""The plans of attention to packed tiers."""

from __future__ import annotations

import pytest

from ttnn_moe.cuda.attention import bucketed
from ttnn_moe.sizes import ceil_div

WIDE = (11, 16, 3, 2, 1)


@pytest.mark.parametrize("n", [1, 2, 8])
@pytest.mark.parametrize("room", [48 << 10, 99 << 10, 227 << 10])
def test_a_block_fits_the_shared_memory(n: int, room: int) -> None:
    of = bucketed.plan(bucketed.Shape(4, n, 32, 4, 64, WIDE), 132, room)
    assert of.shared_memory <= room


@pytest.mark.parametrize("n", [1, 8])
@pytest.mark.parametrize("T", [1, 8, 32])
@pytest.mark.parametrize("pages", [4, 60, 1000])
def test_no_multiprocessor_takes_more_blocks_than_its_share(n: int, T: int, pages: int) -> None:
    shape = bucketed.Shape(T, n, 32, 4, 64, (pages, pages, pages, 2, 1))
    of = bucketed.plan(shape, 132, 227 << 10)
    blocks = T * 4 * shape.blocks(of) * of.splits
    least = (of.shared_memory + 1024) * (ceil_div(blocks, 132) + 1)
    assert blocks * 4 <= 132 or least >= 228 << 10
