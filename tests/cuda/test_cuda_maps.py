"""Tensor maps are made once a tensor, again when its memory is another, and do not outlive it."""

from __future__ import annotations

import gc

import pytest
import torch

from ttnn_moe import Experts
from ttnn_moe.cuda import maps


class Made:
    """What cuda.core would make: it keeps what it was made of."""

    def __init__(self, view: torch.Tensor, box: tuple[int, ...]):
        self.view, self.box = view.detach(), box


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps, "_map", Made)


def _experts(order: str = "halves") -> Experts:
    return Experts.dense(torch.randn(3, 32, 64), torch.randn(3, 64, 16), gate_up_order=order)


def test_made_once_and_gone_with_the_weights() -> None:
    before = len(maps._KEPT)
    experts = _experts()
    first = maps.maps_of(experts)
    again = Experts.dense(experts.tensors["gate_up"], experts.tensors["down"])
    assert maps.maps_of(again) == first and len(maps._KEPT) == before + 2
    del experts, again, first
    gc.collect()
    assert len(maps._KEPT) == before


def test_other_memory_gets_another_map() -> None:
    experts = _experts()
    gate_up = experts.tensors["gate_up"]
    first, first_down = maps.maps_of(experts)
    gate_up.data = gate_up.clone()
    second, second_down = maps.maps_of(experts)
    assert second is not first and second_down is first_down
    assert second.view.data_ptr() == gate_up.data_ptr()


@pytest.mark.parametrize("order", ["halves", "interleaved"])
def test_a_box_alternates_eight_gate_and_eight_up_rows(order: str) -> None:
    experts = _experts(order)
    weight, (made, _) = experts.tensors["gate_up"], maps.maps_of(experts)
    assert made.box == (1, 8, 2, 8, 64)
    gate, up = (weight[:, 0::2], weight[:, 1::2]) if order == "interleaved" else (weight[:, :16], weight[:, 16:])
    for block in range(2):
        rows = slice(8 * block, 8 * block + 8)
        assert torch.equal(made.view[:, block, 0], gate[:, rows])
        assert torch.equal(made.view[:, block, 1], up[:, rows])
