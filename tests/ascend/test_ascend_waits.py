"""A layer on an NPU copies nothing from the host and runs nothing on the AI CPU; distinct ids take 6 operations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import ttnn_moe
from ascend_counting import Counting
from own_registry import own_registry
from ttnn_moe import Experts, Placement, Problem, Routing, api, backend

# Qwen3-30B-A3B's layer
T, E, K, H, I = 64, 128, 8, 2048, 768
CHAIN = ["npu_moe_init_routing_v2", "npu_grouped_matmul", "npu_swiglu", "npu_grouped_matmul", "npu_moe_token_unpermute"]


@pytest.fixture(autouse=True)
def _npu_is_meta(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (api, backend):  # the counter is no tracer
        monkeypatch.setattr(module, "watcher", lambda tensors: None)
    with own_registry() as register, torch.no_grad():
        register("ascend", "ascend_counting:OnMeta")
        yield


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def experts_of(held: int) -> Experts:
    return Experts.dense(empty(held, 2 * I, H), empty(held, H, I))


WHERE: dict[str, Placement | None] = {
    "alone": None,
    "a rank": Placement.uniform(E, 4, 2),
    "one expert": Placement.uniform(E, E, 5),
    "a mesh": Placement.uniform(E, 4),
}


@pytest.mark.parametrize("where", [*WHERE, "eager"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("ids", ["any", "distinct"])
@pytest.mark.parametrize("how", ["plain", "bounded", "fp32 out", "added"])
def test_nothing_waits(where: str, dtype: torch.dtype, ids: str, how: str) -> None:
    placement = WHERE.get(where)
    experts = experts_of(E if placement is None or placement.rank is None else placement.E_local)
    problem = Problem(T, E, K, H, I, device="meta", D=placement.D if placement else 1)
    layer = None if where == "eager" else ttnn_moe.prepare(problem, experts, placement, "ascend", ids=ids)
    hidden, topk, weights = empty(T, H), empty(T, K, dtype=dtype), empty(T, K, dtype=torch.float32)
    bound = torch.empty((), dtype=torch.int32, device="meta") if how == "bounded" else None
    options: dict[str, Any] = {"accumulate": True, "out": empty(T, H)} if how == "added" else {}
    if how == "fp32 out":
        options["out"] = empty(T, H, dtype=torch.float32)
    with Counting() as counted:
        if layer is None:
            routing = Routing.from_topk(topk, weights, E, num_tokens=bound)
            out = ttnn_moe.moe(hidden, routing, experts, backend="ascend", ids=ids, **options)
        else:
            out = layer(hidden, topk, weights, num_tokens=bound, **options)
    assert out.shape == (T, H)
    assert not counted.host_copies and not counted.ai_cpu
    assert [name for name in counted.operations if name in CHAIN] == CHAIN * (4 if where == "a mesh" else 1)
    if where in ("alone", "eager") and how == "plain":
        most = (6 if ids == "distinct" else 15) + (dtype == torch.int64)
        assert len(counted.operations) <= most, counted.operations


def test_distinct_ids_take_six_operations() -> None:
    layer = ttnn_moe.prepare(Problem(T, E, K, H, I, device="meta"), experts_of(E), None, "ascend", ids="distinct")
    with Counting() as counted:
        layer(empty(T, H), empty(T, K, dtype=torch.int32), empty(T, K, dtype=torch.float32))
    assert counted.operations == [*CHAIN[:4], "clamp_min", CHAIN[4]]


WAITS = {
    "where": lambda x: torch.where(x > 0, x, torch.tensor(-1)),
    "to": lambda x: x + torch.arange(3, dtype=torch.int32).to(x.device),
    "tensor": lambda x: torch.tensor([1, 2, 3], device=x.device) + x,
}
ON_AI_CPU = {
    "cumsum": lambda x: x.long().cumsum(0),
    "sort": lambda x: x.sort(),
    "scatter": lambda x: (x >= 0).scatter_(0, x.long(), True),
    "masked_fill": lambda x: x.long().masked_fill(x >= 0, 1),
    "searchsorted": lambda x: torch.searchsorted(x, x),
    "floor_divide": lambda x: x.long() // 2,
}


@pytest.mark.parametrize("name", [*WAITS, *ON_AI_CPU])
def test_what_is_counted(name: str) -> None:
    """The counter itself, on what it must find."""
    x = empty(3, dtype=torch.int32)
    with Counting() as counted:
        (WAITS | ON_AI_CPU)[name](x)
    assert bool(counted.host_copies) == (name in WAITS) and bool(counted.ai_cpu) == (name in ON_AI_CPU)


@pytest.mark.parametrize("read", [Tensor.item, Tensor.tolist, torch.nonzero, torch.unique], ids=lambda f: f.__name__)
def test_a_value_that_is_read_back_raises(read: Any) -> None:
    with Counting(), pytest.raises((RuntimeError, NotImplementedError)):
        read(empty(1, dtype=torch.int32))
