"""The stand-ins of torch_npu's operators against their pages, and what the layer calls against what was checked."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ascend_operators
import ascend_stand_in
from ascend_schemas import SCHEMAS
from ttnn_moe import Experts, Placement, Problem, Routing
from ttnn_moe.ascend import limits, operators, path, run
from ttnn_moe.ascend.layout import weights_of

needs_torch_npu = pytest.mark.skipif(not ascend_stand_in.real(), reason=str(ascend_stand_in.ascend_libraries.why_not()))


@pytest.fixture(scope="module")
def npu() -> Any:
    return ascend_stand_in.npu()


@needs_torch_npu
@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_torch_npus_own(npu: Any, name: str) -> None:
    registered = getattr(torch.ops.npu, name).default._schema
    assert registered == torch._C.parse_schema(f"npu::{SCHEMAS[name]}")


def test_wrong_keywords_are_refused(npu: Any) -> None:
    with pytest.raises(RuntimeError, match="unknown|Unknown|expected"):
        npu.npu_swiglu(torch.zeros(2, 4), axis=-1)


def test_init_routing_as_in_its_page(npu: Any) -> None:
    """The page's example (one row of 613, 475 ids of 226 experts, of which 23 .. 34 are active) by its formulas."""
    h, k, start, end = 613, 475, 23, 35
    x = torch.randn(1, h)
    ids = torch.randint(0, 226, (1, k), dtype=torch.int32)
    scale = torch.randn(1)
    counted = {"expert_tokens_num_type": 1, "expert_tokens_num_flag": True, "row_idx_type": 0}
    kept = {"active_num": 475, "expert_capacity": -1, "expert_num": 226, "active_expert_range": [start, end]}
    plain = {"offset": None, "drop_pad_mode": 0, "quant_mode": -1}
    rows, index, counts, scales = npu.npu_moe_init_routing_v2(x, ids, scale=scale, **kept, **counted, **plain)
    listed = ids[0].tolist()
    order = sorted((i for i in range(k) if start <= listed[i] < end), key=lambda i: (listed[i], i))
    n = len(order)
    assert rows.shape == (k, h) and index.shape == (k,) and index.dtype == torch.int32
    assert torch.equal(rows[:n], x[0].expand(n, h))
    assert [int(index[i]) for i in order] == list(range(n))
    assert all(int(index[i]) == -1 for i in range(k) if i not in order)
    assert counts.tolist() == [listed.count(e) for e in range(start, end)] and counts.dtype == torch.int64
    assert scales.shape == (1 * k,) or scales.shape == (1,)
    assert bool((scales[:n] == scale).all())


@pytest.mark.parametrize("kind", [0, 1])
def test_init_routing_of_all_experts(npu: Any, kind: int) -> None:
    """Written out by hand: ids [[2, 0], [0, 2], [1, 2]]."""
    x = torch.tensor([[1.0], [2.0], [3.0]])
    ids = torch.tensor([[2, 0], [0, 2], [1, 2]], dtype=torch.int32)
    counted = {"expert_tokens_num_type": kind, "expert_tokens_num_flag": True, "row_idx_type": kind}
    rows, index, counts, _ = npu.npu_moe_init_routing_v2(
        x, ids, active_num=6, expert_num=4, active_expert_range=[0, 4], **counted
    )
    assert rows.flatten().tolist() == [1, 2, 3, 1, 2, 3]
    assert index.tolist() == ([3, 0, 1, 4, 2, 5] if kind == 0 else [1, 2, 4, 0, 3, 5])
    assert counts.tolist() == ([2, 3, 6, 6] if kind == 0 else [2, 1, 3, 0])


def test_grouped_matmul_as_in_its_page(npu: Any) -> None:
    """The page's example: three products of their own sizes, fp16, with biases."""
    x = [torch.randn(256, 256).half(), torch.randn(1024, 256).half(), torch.randn(512, 1024).half()]
    weight = [torch.randn(256, 256).half(), torch.randn(256, 1024).half(), torch.randn(1024, 128).half()]
    bias = [torch.randn(256).half(), torch.randn(1024).half(), torch.randn(128).half()]
    out = npu.npu_grouped_matmul(x, weight, bias=bias, group_list=None, split_item=0, group_type=-1)
    for y, a, w, b in zip(out, x, weight, bias, strict=True):
        want = a.double() @ w.double() + b.double()
        assert y.dtype == torch.float16 and y.shape == want.shape
        assert float((y.double() - want).norm() / want.norm()) < 1e-3


@pytest.mark.parametrize("kind, listed", [(0, [2, 2, 3]), (1, [2, 0, 1])])
def test_grouped_matmul_of_groups_of_rows(npu: Any, kind: int, listed: list[int]) -> None:
    """By hand: rows 0 and 1 through weight 0, row 2 through weight 2; running sums and counts say the same."""
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    weight = torch.tensor([[[1.0], [1.0]], [[9.0], [9.0]], [[10.0], [1.0]]])

    def product(groups: list[int]) -> Tensor:
        options = {"split_item": 2, "group_type": 0, "group_list_type": kind}
        (y,) = npu.npu_grouped_matmul([x], [weight], group_list=torch.tensor(groups), **options)
        return y

    assert product(listed).tolist() == [[3.0], [7.0], [56.0]]
    y = product([1, 1, 2] if kind == 0 else [1, 0, 1])
    assert y[:2].tolist() == [[3.0], [34.0]] and bool(y[2].isnan()), "the last row is in no group"
    with pytest.raises(RuntimeError, match="has 3 rows"):
        product([1, 1, 4] if kind == 0 else [1, 1, 2])


def test_swiglu_as_in_its_page(npu: Any) -> None:
    """The page's example, [2, 32, 6, 6] halved along the last axis, by its formula."""
    x = torch.randn(2, 32, 6, 6)
    out = npu.npu_swiglu(x, dim=-1)
    a, b = x.double()[..., :3], x.double()[..., 3:]
    assert out.shape == (2, 32, 6, 3)
    torch.testing.assert_close(out.double(), a / (1 + (-a).exp()) * b, rtol=1e-5, atol=1e-6)


def test_token_unpermute_as_in_its_page(npu: Any) -> None:
    """The page's example: rows [1, 2] and [3, 4], indices 0, 1, weights 1, 1."""
    tokens = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    out = npu.npu_moe_token_unpermute(tokens, torch.tensor([0, 1], dtype=torch.int32), probs=torch.ones(1, 2))
    assert out.tolist() == [[4.0, 6.0]]
    weighed = npu.npu_moe_token_unpermute(
        tokens, torch.tensor([1, 0], dtype=torch.int32), probs=torch.tensor([[10.0, 1.0]])
    )
    assert weighed.tolist() == [[31.0, 42.0]]
    with pytest.raises(RuntimeError, match="each row once"):
        npu.npu_moe_token_unpermute(tokens, torch.tensor([0, 0], dtype=torch.int32), probs=torch.ones(1, 2))


def _inputs(T: int, E: int, K: int, H: int, I: int, distinct: bool = False):
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(T, H, generator=g).bfloat16()
    gate_up = torch.randn(E, 2 * I, H, generator=g).bfloat16()
    experts = Experts.dense(gate_up, torch.randn(E, H, I, generator=g).bfloat16())
    ids = torch.randint(-1, E, (T, K), generator=g, dtype=torch.int32)
    if distinct:
        ids = torch.rand(T, E, generator=g).topk(K).indices.int()
    return hidden, Routing.from_topk(ids, torch.rand(T, K, generator=g), E, distinct=distinct), experts


def _recording(npu: Any, note: Callable[[str, tuple[Any, ...], dict[str, Any], Any], object]) -> types.SimpleNamespace:
    """The layer's operators of npu; each tells note its name, its arguments and its result."""

    def recorder(name: str):
        def call(*args: Any, **kwargs: Any) -> Any:
            result = getattr(npu, name)(*args, **kwargs)
            note(name, args, kwargs, result)
            return result

        return call

    return types.SimpleNamespace(**{name: recorder(name) for name in operators.LAYER})


@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize("E", [1, 8])
@pytest.mark.parametrize("wide", [False, True])
def test_the_layer_calls_what_was_checked(npu: Any, E: int, wide: bool, distinct: bool) -> None:
    """Operator by operator: the shapes, strides, dtypes and numbers that the limits were held against."""
    T, K, H, I = 5, min(E, 3), 16, 8
    seen: list[tuple[str, dict[str, Any]]] = []

    def note(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        positional = [argument.name for argument in getattr(torch.ops.npu, name).default._schema.arguments]
        seen.append((name, {**dict(zip(positional, args, strict=False)), **kwargs}))

    hidden, routing, experts = _inputs(T, E, K, H, I, distinct)
    out = torch.empty(T, H, dtype=torch.float32 if wide else torch.bfloat16)
    path.moe(_recording(npu, note), hidden, routing, weights_of(experts), out, False)
    planned = run.calls(T, E, K, H, I, torch.bfloat16, wide, distinct)
    assert [name for name, _ in seen] == [name for name, _ in planned]
    for (name, got), (_, want) in zip(seen, planned, strict=True):
        assert got.keys() == want.keys(), name
        for key in want:
            assert _form(got[key]) == _form(want[key]), f"{name}: {key}"


def _form(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return [_form(one) for one in value] if isinstance(value, list) else value


@needs_torch_npu
def test_shapes_at_full_size_through_torch_npus_own_shape_functions(npu: Any) -> None:
    """Qwen3-30B-A3B's layer on meta tensors: no value is there to be read, so nothing waits for the NPU."""
    T, E, K, H, I = 4096, 128, 8, 2048, 768
    meta = torch.device("meta")
    hidden = torch.empty(T, H, dtype=torch.bfloat16, device=meta)
    gate_up = torch.empty(E, 2 * I, H, dtype=torch.bfloat16, device=meta)
    experts = Experts.dense(gate_up, torch.empty(E, H, I, dtype=torch.bfloat16, device=meta))
    ids, weights = torch.empty(T, K, dtype=torch.int32, device=meta), torch.empty(T, K, device=meta)
    routing = Routing.from_topk(ids, weights, E, num_tokens=torch.empty(1, dtype=torch.int32, device=meta))
    out = torch.empty(T, H, dtype=torch.bfloat16, device=meta)
    shapes: list[tuple[str, list[tuple[torch.Size, torch.dtype]]]] = []

    def note(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        listed = [result] if isinstance(result, torch.Tensor) else list(result)
        shapes.append((name, [(tensor.shape, tensor.dtype) for tensor in listed]))

    path.moe(_recording(npu, note), hidden, routing, weights_of(experts), out, False)
    by_operator = [(name, rows[: 3 if name == limits.ROUTE else 1]) for name, rows in shapes]
    bf16 = torch.bfloat16
    assert by_operator == [
        (limits.ROUTE, [((T * K, H), bf16), ((T * K,), torch.int32), ((E + 1,), torch.int64)]),
        (limits.MATMUL, [((T * K, 2 * I), bf16)]),
        (limits.SWIGLU, [((T * K, I), bf16)]),
        (limits.MATMUL, [((T * K, H), bf16)]),
        (limits.UNPERMUTE, [((T, H), bf16)]),
    ]


def test_no_group_of_one_count_and_no_empty_call(npu: Any) -> None:
    """One local expert, and no token: both are what the operators would refuse."""
    hidden, routing, experts = _inputs(4, 1, 2, 16, 8)
    out = torch.empty(4, 16, dtype=torch.bfloat16)
    path.moe(npu, hidden, routing, weights_of(experts), out, False)
    assert out.isfinite().all()
    nothing = Routing.from_topk(torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2), 1)
    path.moe(None, hidden[:0], nothing, weights_of(experts), out[:0], False)


def test_a_pair_without_an_expert_is_not_multiplied(npu: Any) -> None:
    hidden, routing, experts = _inputs(9, 4, 3, 16, 8)
    counts: list[Tensor] = []

    def note(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if name == "npu_grouped_matmul":
            counts.append(kwargs["group_list"])

    path.moe(_recording(npu, note), hidden, routing, weights_of(experts), torch.empty_like(hidden), False)
    valid = int((routing.ids >= 0).sum())
    assert 0 < valid < 27 and [int(count.sum()) for count in counts] == [valid, valid]


def test_a_pair_without_an_expert_adds_nothing(npu: Any) -> None:
    """NaN in an expert that nobody names, or in a token that names nobody, must not come out."""
    hidden, _, experts = _inputs(3, 4, 2, 16, 8)
    for tensor in experts.tensors.values():
        tensor[0] = float("nan")
    hidden[2] = float("nan")
    ids = torch.tensor([[-1, 2], [3, 9], [-1, -1]], dtype=torch.int32)
    out = torch.full((3, 16), 7.0).bfloat16()
    path.moe(npu, hidden, Routing.from_topk(ids, torch.ones(3, 2), 4), weights_of(experts), out, False)
    assert out[:2].isfinite().all() and bool((out[:2] != 0).any())
    assert bool((out[2] == 0).all())


PROMISE_BROKEN = {
    "below": [[-1, 2], [0, 1]],
    "beyond": [[9, 2], [0, 4]],
    "twice": [[2, 2], [0, 1]],
    "all": [[-1, -7], [8, 2**31 - 1]],
}


@pytest.mark.parametrize("name", PROMISE_BROKEN)
def test_a_broken_promise_stays_within_the_rows(npu: Any, name: str) -> None:
    """Every row that an operator reads is there, and a token whose ids keep the promise gets its numbers."""
    hidden, _, experts = _inputs(3, 4, 2, 16, 8)
    ids = torch.tensor([*PROMISE_BROKEN[name], [3, 1]], dtype=torch.int32)
    routing = Routing.from_topk(ids, torch.rand(3, 2), 4)
    want, out = (torch.empty(3, 16, dtype=torch.bfloat16) for _ in range(2))
    path.moe(npu, hidden, routing, weights_of(experts), want, False)
    with ascend_operators.out_of_range_ids():
        path.moe(npu, hidden, routing.promised("distinct"), weights_of(experts), out, False)
    assert torch.equal(out[2], want[2])
    if name == "twice":
        assert torch.equal(out, want), "both count"


def test_a_mesh_driven_by_one_process_adds_its_devices_up(npu: Any) -> None:
    backend = ascend_stand_in.OnCpu()
    hidden, routing, experts = _inputs(9, 8, 3, 32, 16)
    whole = torch.empty(9, 32, dtype=torch.float32)
    backend.moe(hidden, routing, experts, whole, False)
    placement = Placement.from_mapping([[0, 7, 2, 5], [1, 3, 4, 6]])
    problem = Problem(9, 8, 3, 32, 16, torch.bfloat16, torch.float32, D=2)
    mesh = backend.prepare(problem, experts, placement)
    torch.testing.assert_close(mesh(hidden, routing.topk_ids, routing.topk_weights), whole, rtol=1e-5, atol=1e-4)
    parts = [
        backend.prepare(problem, experts.for_device(placement, d), Placement(placement.device_expert_mapping, d))
        for d in range(2)
    ]
    summed = sum(part(hidden, routing.topk_ids, routing.topk_weights) for part in parts)
    torch.testing.assert_close(summed, whole, rtol=1e-5, atol=1e-4)
    narrow = backend.prepare(Problem(9, 8, 3, 32, 16, torch.bfloat16, D=2), experts, placement)
    assert torch.equal(narrow(hidden, routing.topk_ids, routing.topk_weights), whole.bfloat16())


@needs_torch_npu
def test_shapes_of_the_exchange_through_torch_npus_own_shape_functions(npu: Any, monkeypatch) -> None:
    """Qwen3-30B-A3B over 16 ranks: A rows come, as the plan says, and combine gives back the tokens."""
    from torch_npu.op_plugin.meta import _meta_registrations as meta

    monkeypatch.setattr(meta, "get_soc_version", lambda: 223)  # that of a 910B3; no NPU is here to be asked
    from ttnn_moe.parallel.exchanges.npu import DispatchCombine, Plan

    made = Plan("hierarchy", 16, 3, 128, 8, 2048, 128, torch.bfloat16, 0)
    (_, dispatched), (_, combined) = made.calls("group")
    rows, _, assist, counts, recv, _, scales = npu.npu_moe_distribute_dispatch_v2(**dispatched)
    assert rows.shape == (made.rows, 2048) and rows.dtype == torch.bfloat16
    assert assist.shape == (made.rows * 128,) and assist.dtype == torch.int32
    assert counts.shape == (8,) and counts.dtype == torch.int64
    assert scales.shape == (made.rows,) and scales.dtype == torch.float32
    out = npu.npu_moe_distribute_combine_v2(ep_send_counts=recv, **combined)
    assert out.shape == (128, 2048) and out.dtype == torch.bfloat16
    # and the layer around them reads no value back
    exchange = DispatchCombine(npu, made, Placement.uniform(128, 16, 3), "group")
    routing = Routing.from_topk(
        torch.empty(128, 8, dtype=torch.int32, device="meta"),
        torch.empty(128, 8, device="meta"),
        128,
        num_tokens=torch.empty(1, dtype=torch.int32, device="meta"),
    )
    gate_up = torch.empty(8, 2 * 768, 2048, dtype=torch.bfloat16, device="meta")
    experts = Experts.dense(gate_up, torch.empty(8, 2048, 768, dtype=torch.bfloat16, device="meta"))
    out = exchange(torch.empty(128, 2048, dtype=torch.bfloat16, device="meta"), routing, experts)
    assert out.shape == (128, 2048) and out.dtype == torch.bfloat16
