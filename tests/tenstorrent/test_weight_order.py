"""The tiles of weights lie where device_kernels/common/weights.hpp reads them."""

from __future__ import annotations

import pytest
import torch

from ttnn_moe.tenstorrent.weights import in_bank_order, line_of_page


@pytest.mark.parametrize(("banks", "run"), [(12, 4), (8, 4), (8, 7), (7, 14), (1, 3)])
@pytest.mark.parametrize("tiles", [1, 31, 96, 1000])
def test_a_run_of_the_line_lies_side_by_side_in_one_bank(tiles: int, banks: int, run: int) -> None:
    line = line_of_page(tiles, banks, run)
    assert sorted(line.tolist()) == list(range(tiles))
    page = line.argsort()
    grouped = tiles // (banks * run) * banks * run
    for first in range(0, grouped, run):
        pages = page[first : first + run]
        assert set((pages % banks).tolist()) == {first // run % banks}
        assert (pages // banks).diff().eq(1).all()
    assert torch.equal(page[grouped:], torch.arange(grouped, tiles))


def test_experts_of_a_device_are_one_line() -> None:
    E, D, K, N, banks, run = 4, 2, 64, 96, 2, 3
    tile = torch.arange(E * 6).reshape(E, K // 32, 1, N // 32, 1)  # a number a tile
    laid = in_bank_order(tile.expand(E, K // 32, 32, N // 32, 32).reshape(E, K, N), D, banks, run)
    assert laid.shape == (E, N // 32, K, 32)
    pages = laid[:, :, ::32, 0].reshape(D, -1)
    by_line = tile.reshape(D, 2, K // 32, N // 32).transpose(2, 3).reshape(D, -1)
    assert torch.equal(pages, by_line[:, line_of_page(12, banks, run)])
