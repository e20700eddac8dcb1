"""What surrounds a call: autocast, inference mode, threads, shared memory, views, bounds out of range."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import Tensor

import ascend_stand_in
import ttnn_moe
from operator_calls import CALLS, E, Given, H, I, K, T, given
from ttnn_moe import ContractError, Experts, Placement, Problem, Routing, TtnnMoeError
from ttnn_moe.parallel import ExpertParallel

ways = pytest.mark.parametrize("way", CALLS)
MESH = Placement.uniform(E, 2)


# autocast


@ways
@pytest.mark.parametrize("watched", [False, True], ids=["eager", "as an op"])
def test_autocast_changes_no_bit(way: str, watched: bool) -> None:
    call, rows = CALLS[way]
    if watched and (way.startswith("prepared") or way in ("mesh", "rank")):
        pytest.skip("a prepared layer is refused there")
    want = call(given(rows))
    x = given(rows)
    x.rows.requires_grad_(watched)
    with torch.autocast("cpu", torch.bfloat16):
        got = call(x)
    n = 3 if "bounded" in way or way == "up" else len(want)
    assert got.dtype == want.dtype == torch.float32
    assert torch.equal(got[:n], want[:n])


def test_autocast_does_not_reach_the_ascend_operators() -> None:
    x = given()
    experts = Experts.dense(x.gate_up.half(), x.down.half())
    with ascend_stand_in.registered():
        layer = ttnn_moe.prepare(Problem.of(T, K, experts, torch.float16), experts, backend="ascend")
        want = layer(x.rows.half(), x.ids, x.weights)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(layer(x.rows.half(), x.ids, x.weights), want)


# inference mode


@ways
@pytest.mark.parametrize("inside", ["weights", "layer", "call"])
def test_inference_mode_around_a_part(way: str, inside: str) -> None:
    """Weights, a prepared layer, or earlier calls were made under inference_mode; the call is outside it."""
    call, rows = CALLS[way]
    want = call(given(rows))
    if inside == "call":
        with torch.inference_mode():
            call(given(rows))
    x = given(rows)
    if inside == "weights":
        with torch.inference_mode():
            x.gate_up, x.down, x.ids, x.weights = (y.clone() for y in (x.gate_up, x.down, x.ids, x.weights))
    if inside == "layer" and way not in ("prepared", "mesh"):
        pytest.skip("no layer")
    if inside == "layer":
        with torch.inference_mode():
            layer = ttnn_moe.prepare(
                Problem.of(T, K, x.experts, torch.float32), x.experts, MESH if way == "mesh" else None
            )
            layer(x.rows, x.ids, x.weights)
        got = layer(x.rows, x.ids, x.weights)
    else:
        got = call(x)
    n = 3 if "bounded" in way or way == "up" else len(want)
    assert torch.equal(got[:n], want[:n])


@pytest.mark.parametrize("way", ["moe out", "down added", "prepared out"])
def test_an_out_of_inference_mode_is_refused_outside(way: str) -> None:
    call, rows = CALLS[way]
    x = given(rows)
    with torch.inference_mode():
        x.out = x.out.clone()
    with pytest.raises(ContractError, match="out was made under torch.inference_mode"):
        call(x)


# memory


def shared(x: Given, name: str) -> None:
    """Make out a part of the memory of an argument, which keeps its values."""
    old = getattr(x, name)
    room = torch.zeros(old.numel() + T * H, dtype=old.dtype)
    new = room[: old.numel()].view(old.shape)
    new.copy_(old)
    setattr(x, name, new)
    x.out = room.view(torch.float32)[old.numel() - 1 : old.numel() - 1 + T * H].view(T, H)


@pytest.mark.parametrize("way", [way for way in CALLS if way.split()[-1] in ("out", "added")])
@pytest.mark.parametrize("name", ["rows", "ids", "weights", "gate_up", "down", "num_tokens"])
def test_out_that_shares_memory_is_refused(way: str, name: str) -> None:
    call, rows = CALLS[way]
    x = given(rows)
    shared(x, name)
    bounded = "bounded" in way or way in ("down out", "prepared added")
    if name == "num_tokens" and not bounded:
        call(x)
        return
    before = x.out.clone()
    with pytest.raises(ContractError, match="out shares memory with an argument"):
        call(x)
    assert torch.equal(x.out, before)


@pytest.mark.parametrize("first", [0, 1])
def test_out_beside_hidden_in_one_tensor_is_taken(first: int) -> None:
    x, both = given(), torch.zeros(2, T, H)
    both[first] = x.rows
    want = ttnn_moe.moe(x.rows, x.routing, x.experts)
    assert torch.equal(ttnn_moe.moe(both[first], x.routing, x.experts, out=both[1 - first]), want)


def negative(x: Tensor) -> Tensor:
    """The same values behind torch's negative bit."""
    view: Tensor = torch._neg_view(-x)  # type: ignore[attr-defined]
    assert view.is_neg() and torch.equal(view, x)
    return view


@ways
@pytest.mark.parametrize("name", ["rows", "weights", "ids", "num_tokens"])
def test_negative_views_count_as_their_values(way: str, name: str) -> None:
    call, rows = CALLS[way]
    want, x = call(given(rows)), given(rows)
    setattr(x, name, negative(getattr(x, name)))
    n = 3 if "bounded" in way or way == "up" else len(want)
    assert torch.equal(call(x)[:n], want[:n])


def test_what_a_backend_gets_holds_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel reads addresses, and knows nothing of torch's negative bit."""
    from ttnn_moe.reference import ReferenceBackend

    seen: list[Tensor] = []

    def moe(self: object, hidden: Tensor, routing: Routing, *_: object) -> None:
        seen.extend((hidden, routing.topk_ids, routing.topk_weights, routing.num_tokens))  # type: ignore[arg-type]

    monkeypatch.setattr(ReferenceBackend, "moe", moe)
    x = given()
    x.rows, x.ids, x.weights, x.num_tokens = map(negative, (x.rows, x.ids, x.weights, x.num_tokens))
    ttnn_moe.moe(x.rows, x.bounded, x.experts)
    assert len(seen) == 4 and not any(tensor.is_neg() for tensor in seen)


@pytest.mark.parametrize("name", ["gate_up", "down", "out"])
def test_negative_weights_and_out_are_refused(name: str) -> None:
    x = given()
    setattr(x, name, negative(getattr(x, name)))
    for call in (CALLS["moe out"][0], CALLS["prepared out"][0]):
        with pytest.raises(ContractError, match=f"{name} is a negative view"):
            call(x)


@ways
def test_strides_do_not_matter(way: str) -> None:
    call, rows = CALLS[way]
    want, x = call(given(rows)), given(rows)
    x.rows, x.weights, x.ids = (
        torch.stack([y, torch.full_like(y, -7)], -1)[..., 0] for y in (x.rows, x.weights, x.ids)
    )
    assert not x.rows.is_contiguous()
    n = 3 if "bounded" in way or way == "up" else len(want)
    assert torch.equal(call(x)[:n], want[:n])


# num_tokens out of range


@pytest.mark.parametrize("n", [-(2**31), -3, 0, T, T + 1, 2**31 - 1])
@pytest.mark.parametrize("kind", ["moe", "prepared", "mesh", "rank", "ascend", "ascend mesh"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_num_tokens_is_clamped(n: int, kind: str, accumulate: bool) -> None:
    x, true = given(), min(max(n, 0), T)
    num_tokens = torch.tensor(n, dtype=torch.int32)
    x.num_tokens = num_tokens
    if kind == "moe":
        call: Callable[..., Tensor] = lambda out, bound: ttnn_moe.moe(  # noqa: E731
            x.rows, x.bounded if bound is not None else x.routing, x.experts, out=out, accumulate=accumulate
        )
    else:
        on_ascend = kind.startswith("ascend")
        rows = x.rows.half() if on_ascend else x.rows
        experts = Experts.dense(x.gate_up.half(), x.down.half()) if on_ascend else x.experts
        placement = MESH if kind.endswith("mesh") else Placement.uniform(E, 2, 1) if kind == "rank" else None
        problem = Problem.of(2 * T, K, experts, rows.dtype)
        with ascend_stand_in.registered():
            layer = ttnn_moe.prepare(
                problem,
                experts.for_device(placement) if kind == "rank" and placement is not None else experts,
                placement,
                backend="ascend" if on_ascend else "reference",
            )
        call = lambda out, bound: layer(  # noqa: E731
            rows, x.ids, x.weights, out=out, accumulate=accumulate, num_tokens=bound
        )
    want, got = x.out.clone(), x.out.clone()
    call(want, None)
    call(got, num_tokens)
    tolerance = {"rtol": 2e-3, "atol": 1e-2} if kind.startswith("ascend") else {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(got[:true], want[:true], **tolerance)
    assert torch.equal(got[true:], x.out[true:]), "rows from num_tokens on are not written"


# routing, experts and rows that do not belong together


@pytest.mark.parametrize("more", [E - 1, E + 1, 64])
@pytest.mark.parametrize("way", ["moe", "gate", "up", "gate_up", "down", "down out", "down added"])
@pytest.mark.parametrize("watched", [False, True], ids=["eager", "as an op"])
def test_another_number_of_experts_is_refused(way: str, more: int, watched: bool) -> None:
    call, rows = CALLS[way]
    x = given(rows)
    x.rows.requires_grad_(watched)
    x.gate_up, x.down = torch.randn(more, 2 * I, H), torch.randn(more, H, I)
    with pytest.raises(ContractError, match="routing and experts disagree on E"):
        call(x)


@pytest.mark.parametrize("watched", [False, True], ids=["eager", "as an op"])
@pytest.mark.parametrize("name", ["rows", "gate_up", "ids", "out"])
@pytest.mark.parametrize("way", ["moe out", "down out", "down added", "prepared out"])
def test_another_device_is_refused(way: str, name: str, watched: bool) -> None:
    call, rows = CALLS[way]
    x = given(rows)
    x.weights.requires_grad_(watched)
    moved = ("gate_up", "down") if name == "gate_up" else ("ids", "weights", "num_tokens") if name == "ids" else (name,)
    for each in moved:
        setattr(x, each, getattr(x, each).to("meta"))
    with pytest.raises(TtnnMoeError, match="device|record this call|on meta"):
        call(x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool, torch.complex64, torch.bfloat16])
def test_another_dtype_of_activations_is_refused(dtype: torch.dtype) -> None:
    x = given((T * K, I))
    x.rows = x.rows.to(dtype)
    with pytest.raises(ContractError, match="activations (has|have|and)"):
        CALLS["down"][0](x)


# threads


def together(calls: list[Callable[[], object]], rounds: int = 40) -> list[list[object]]:
    """Each call in a thread of its own, many times over; their results."""
    start = Barrier(len(calls))

    def work(call: Callable[[], object]) -> list[object]:
        start.wait()
        return [call() for _ in range(rounds)]

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(work, call) for call in calls]]


@pytest.mark.parametrize("placement", [None, MESH], ids=["one", "mesh"])
@pytest.mark.parametrize("backend", ["reference", "ascend"])
def test_threads_may_share_a_prepared_layer(backend: str, placement: Placement | None) -> None:
    dtype = torch.float32 if backend == "reference" else torch.float16
    inputs = [given(seed=seed) for seed in range(3)]
    experts = Experts.dense(inputs[0].gate_up.to(dtype), inputs[0].down.to(dtype))
    with ascend_stand_in.registered():
        layer = ttnn_moe.prepare(Problem.of(T, K, experts, dtype), experts, placement, backend)

    def call(x: Given) -> Callable[[], Tensor]:
        return lambda: layer(x.rows.to(dtype), x.ids, x.weights)

    want = [call(x)() for x in inputs]
    for results, right in zip(together([call(x) for x in inputs]), want, strict=True):
        assert all(torch.equal(result, right) for result in results)  # type: ignore[arg-type]


def test_threads_may_not_share_expert_parallelism(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        x = given()
        placement = Placement.uniform(E, 1, 0)
        layer = ExpertParallel(Problem.of(T, K, x.experts, torch.float32), x.experts, placement, backend="reference")
        want, exchange = layer(x.rows, x.ids, x.weights), layer.exchange

        def another(*args: object) -> Tensor:
            with ThreadPoolExecutor(1) as pool, pytest.raises(ContractError, match="two threads call one"):
                pool.submit(layer, x.rows, x.ids, x.weights).result()
            return exchange(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(layer, "exchange", another)
        assert torch.equal(layer(x.rows, x.ids, x.weights), want)
        monkeypatch.undo()
        assert torch.equal(layer(x.rows, x.ids, x.weights), want), "the turn was given back"
    finally:
        torch.distributed.destroy_process_group()


def test_a_failed_call_gives_its_turn_back(monkeypatch: pytest.MonkeyPatch) -> None:
    x = given()
    layer = ttnn_moe.prepare(Problem.of(T, K, x.experts, torch.float32), x.experts)
    want = layer(x.rows, x.ids, x.weights)
    with monkeypatch.context() as patch:
        patch.setattr(layer._backend, "run", lambda *_: 1 / 0, raising=False)  # type: ignore[attr-defined]
        with pytest.raises(ZeroDivisionError):
            layer(x.rows, x.ids, x.weights)
    assert torch.equal(layer(x.rows, x.ids, x.weights), want)
