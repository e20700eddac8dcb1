"""The plans of attention to packed tiers."""

from __future__ import annotations

import pytest

from ttnn_moe.cuda.attention import bucketed

WIDE = (11, 16, 3, 2, 1)


@pytest.mark.parametrize("n", [1, 2, 8])
@pytest.mark.parametrize("room", [48 << 10, 99 << 10, 227 << 10])
def test_a_block_fits_the_shared_memory(n: int, room: int) -> None:
    of = bucketed.plan(bucketed.Shape(4, n, 32, 4, 64, WIDE), 132, room)
    assert of.shared_memory <= room
