"""What links of the NoC carry from DRAM: routes, and the layer's weights interleaved and by bank."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from benchmark_scripts import script
from ttnn_moe.tenstorrent.emulator import CHIPS, Result
from ttnn_moe.tenstorrent.emulator.links import Load, load, route

N150 = CHIPS["n150"]


def test_noc_0_goes_right_then_down_and_noc_1_up_then_left() -> None:
    assert [end for _, _, end in route(N150, 0, (8, 10), (0, 0))] == [(9, 10), (0, 10), (0, 11), (0, 0)]
    assert [end for _, _, end in route(N150, 1, (1, 1), (9, 11))] == [(1, 0), (1, 11), (0, 11), (9, 11)]
    assert list(route(N150, 0, (3, 3), (3, 3))) == []


def test_the_links_of_one_read() -> None:
    read = [0] * 24
    read[1] = 100  # bank 1 stands at (0, 1), core (1, 2) at (2, 3)
    result = Result([], {}, {}, banks={(1, 2): read})
    assert load(N150, result) == Load(100, 400, 100)
    assert load(N150, result).hops == 4
    assert load(N150, result, exchanged=True).hops == 10 + 8  # up and left, round the torus


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ttnn_moe._planner") is None, reason="plans come from the planner")
@pytest.mark.parametrize("chip", CHIPS)
def test_weights_by_bank_pass_half_as_many_links(chip: str) -> None:
    cost = script("tenstorrent_cost")
    sys.modules.pop("tenstorrent_cost", None)
    before, after = (cost.emulate(chip, 1, "uniform", f"bfloat16{more}") for more in ("", ",layout=banked"))
    assert after.hops < 0.55 * before.hops
    assert after.link_us < 0.8 * before.link_us < 0.8 * before.exchanged_us
    assert after.dram_packets <= before.dram_packets and after.weight_bytes == before.weight_bytes
    assert after.simulated_us < 1.05 * before.simulated_us
