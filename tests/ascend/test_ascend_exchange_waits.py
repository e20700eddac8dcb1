"""An exchange on an NPU copies nothing from the host and runs nothing on the AI CPU; all_to_all reads its sizes."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend_counting import Counting, npu
from own_registry import own_registry
from ttnn_moe import Experts, Placement, Routing, api
from ttnn_moe.ascend.operators import COMBINE, DISPATCH, MATMUL, SWIGLU
from ttnn_moe.parallel.exchanges import all_gather
from ttnn_moe.parallel.exchanges.npu import DispatchCombine
from ttnn_moe.parallel.exchanges.npu_plan import Plan

# Qwen3-30B-A3B's layer
T, E, K, H, I, D = 64, 128, 8, 2048, 768, 16
PLACEMENT = Placement.from_mapping([list(range(d, E, D)) for d in range(D)], 3)


@pytest.fixture(autouse=True)
def _npu_is_meta(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Messages are sent nowhere: what is counted is the work around them."""
    monkeypatch.setattr(api, "watcher", lambda tensors: None)  # the counter is no tracer
    for name in ("_gather", "_reduce_scatter"):
        monkeypatch.setattr(all_gather, name, lambda *tensors, group: None)
    monkeypatch.setattr(all_gather.dist, "all_to_all_single", lambda *tensors, group: None)
    with own_registry() as register, torch.no_grad():
        register("ascend", "ascend_counting:OnMeta")
        yield


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def exchange_of_operators() -> DispatchCombine:
    made = Plan("hierarchy", D, 3, E, K, H, T, torch.bfloat16, 0)

    def dispatch(x: Tensor, expert_ids: Tensor, **options: Any) -> tuple[Tensor, ...]:
        ints, long = torch.int32, torch.int64
        rows, counts = empty(made.rows, H), empty(E // D, dtype=long)
        assert expert_ids.dtype == ints and expert_ids.is_meta
        return rows, empty(0), empty(made.rows * 128, dtype=ints), counts, empty(E, dtype=ints), empty(0), empty(0)

    operators = {MATMUL: npu().npu_grouped_matmul, SWIGLU: npu().npu_swiglu, DISPATCH: dispatch}
    operators[COMBINE] = lambda expert_ids, **options: empty(len(expert_ids), H)
    return DispatchCombine(types.SimpleNamespace(**operators), made, PLACEMENT, "group")


EXCHANGES = {
    "dispatch_combine": exchange_of_operators,
    "all_gather, ordered": lambda: all_gather.AllGather(PLACEMENT, T, backend="ascend"),
    "all_gather, by the library": lambda: all_gather.AllGather(PLACEMENT, T, backend="ascend", ordered=False),
}


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize("tokens", [T, 1, 0])
@pytest.mark.parametrize("how", ["any", "distinct", "bounded", "int64"])
def test_nothing_waits(name: str, tokens: int, how: str) -> None:
    exchange = EXCHANGES[name]()
    experts = Experts.dense(empty(E // D, 2 * I, H), empty(E // D, H, I))

    def call() -> Tensor:
        ids = empty(tokens, K, dtype=torch.int64 if how == "int64" else torch.int32)
        bound = empty(1, dtype=torch.int32) if how == "bounded" else None
        weights = empty(tokens, K, dtype=torch.float32)
        routing = Routing.from_topk(ids, weights, E, num_tokens=bound, distinct=how == "distinct")
        return exchange(empty(tokens, H), routing, experts)

    call()  # tables are copied once
    with Counting() as counted:
        out = call()
    assert out.shape == (tokens, H)
    assert counted.host_copies == [] and counted.ai_cpu == []
    if name == "dispatch_combine" and how == "distinct" and tokens:
        assert counted.operations == ["clamp_min", "clamp_max", "index_select", MATMUL, SWIGLU, MATMUL]
