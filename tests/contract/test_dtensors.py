"""Tensors spread over a device mesh: each entry point refuses them and names the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_kinds import CALLS, IDS, WEIGHTS, X
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from ttnn_moe import Placement
from ttnn_moe.errors import ContractError

PLAIN = {"ids": IDS, "weights": WEIGHTS, "prepared ids": IDS, "prepared weights": WEIGHTS}
NAMES = ("hidden", "out", "dense", "silu_mul", "prepared hidden", "prepared out", *PLAIN)


@pytest.fixture(scope="module")
def spread() -> Iterator[Callable[[torch.Tensor], Any]]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    yield lambda x: distribute_tensor(x, mesh, [Replicate()])
    dist.destroy_process_group()


@pytest.mark.parametrize("name", NAMES)
def test_a_dtensor_is_refused(spread: Callable[[torch.Tensor], Any], name: str) -> None:
    call, _ = CALLS[name]
    with pytest.raises(ContractError, match=r"is a DTensor; got a DTensor \[.*to_local"):
        call(spread(PLAIN.get(name, X)))


@pytest.mark.parametrize("place", [Placement, Placement.from_mapping])
def test_a_dtensor_of_experts_is_refused(spread: Callable[[torch.Tensor], Any], place: Callable[[Any], Any]) -> None:
    with pytest.raises(ContractError, match=r"mapping is a DTensor; got a DTensor \[.*to_local"):
        place(spread(torch.tensor([[1, 0]], dtype=torch.int32)))
