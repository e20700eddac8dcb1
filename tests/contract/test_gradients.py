"""No gradient is lost without a word: on every way into the operator, under every way to ask for one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import ascend_stand_in
import ttnn_moe
from operator_calls import CALLS, LEAVES, E, Given, H, K, T, given
from ttnn_moe import ContractError, Experts, Placement, Problem, Routing
from ttnn_moe.backend import Prepared
from ttnn_moe.errors import GradientsRefused, TtnnMoeError
from ttnn_moe.reference import PreparedReference, ReferenceBackend

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
ways = pytest.mark.parametrize("way", CALLS)


def reads(way: str, leaf: str) -> bool:
    """Whether a call's result depends on a tensor."""
    if way == "silu_mul":
        return leaf == "rows"
    if way in ("gate", "up", "gate_up"):
        return leaf in ("rows", "gate_up")
    return leaf != "gate_up" or not way.startswith("down")


@ways
@pytest.mark.parametrize("leaf", [*LEAVES, "out"])
def test_a_backward_pass_is_refused(way: str, leaf: str) -> None:
    call, rows = CALLS[way]
    if leaf == "out" and way.split()[-1] not in ("out", "added"):
        pytest.skip("this call takes no out")
    want = call(given(rows))
    x = given(rows)
    root = getattr(x, leaf).requires_grad_()
    if leaf == "out":
        x.out = root + 0
    beside = root.square().sum()
    try:
        result = call(x)
    except ContractError as error:
        assert "something would record this call; got autograd" in str(error)
        return
    n = 3 if "bounded" in way else len(result)
    assert torch.equal(result[:n].detach(), want[:n]), "the forward pass computes as ever"
    if leaf != "out" or way.endswith("added"):
        if not reads(way, leaf) and leaf != "out":
            return
        with pytest.raises(GradientsRefused, match="no backward pass"):
            (beside + result[:3].square().sum()).backward()


@ways
def test_without_gradients_nothing_is_recorded(way: str) -> None:
    call, rows = CALLS[way]
    want = call(given(rows))
    assert not want.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        x = given(rows)
        for leaf in LEAVES:
            getattr(x, leaf).requires_grad_()
        with mode():
            x.out = x.out.clone()
            result = call(x)
            n = 3 if "bounded" in way or way == "up" else len(result)
            assert torch.equal(result[:n], want[:n])
        assert not result.requires_grad


def dual(call: Callable[[Tensor], Tensor], rows: Tensor) -> object:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(call(forward_ad.make_dual(rows, torch.ones_like(rows)))).tangent


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], object]] = {
    "dual": dual,
    "jvp": lambda call, rows: torch.func.jvp(call, (rows,), (rows,)),
    "jacfwd": lambda call, rows: torch.func.jacfwd(call)(rows),
    "vjp": lambda call, rows: torch.func.vjp(call, rows)[1](torch.ones(T, H)),
    "func.grad": lambda call, rows: torch.func.grad(lambda y: call(y).sum())(rows),
    "jit.trace": lambda call, rows: torch.jit.trace(call, (rows,), check_trace=False),
}


@ways
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_are_refused(way: str, transform: str) -> None:
    call, rows = CALLS[way]
    x = given(rows)

    def of(rows: Tensor) -> Tensor:
        x.rows = rows
        return call(x)

    with pytest.raises(TtnnMoeError, match="torch.jit.trace|gradients|record this call"):
        TRANSFORMS[transform](of, x.rows)


@ways
def test_vmap_is_right_or_refused(way: str) -> None:
    call, rows = CALLS[way]
    x, want = given(rows), call(given(rows))

    def of(rows: Tensor) -> Tensor:
        x.rows = rows
        return call(x)

    if way == "silu_mul":
        assert torch.equal(torch.vmap(of)(x.rows[None])[0], want)
    else:
        with pytest.raises((ContractError, RuntimeError), match="Batching rule|record this call"):
            torch.vmap(of)(x.rows[None])


def test_gradients_by_other_tensors_pass() -> None:
    """A transform that asks for gradients by tensors that the call does not read."""
    x = given()
    call = CALLS["moe"][0]
    want = call(x)
    grad = torch.func.grad(lambda factor: (factor * call(x)).sum())(torch.ones(()))
    torch.testing.assert_close(grad, want.sum())
    _, tangent = torch.func.jvp(lambda factor: factor * call(x), (torch.ones(()),), (torch.ones(()),))
    torch.testing.assert_close(tangent, want)
    factor = torch.ones((), requires_grad=True)
    (factor * call(x)).sum().backward()
    torch.testing.assert_close(factor.grad, want.sum())


COMPILED = ("moe", "moe added", "down out")


@pytest.mark.parametrize("way", COMPILED)
def test_compiled_gradients_are_refused(way: str) -> None:
    call, rows = CALLS[way]
    x = given(rows)

    def of(rows: Tensor) -> Tensor:
        x.rows = rows
        return call(x)

    torch._dynamo.reset()
    compiled = torch.compile(of, fullgraph=True, backend="aot_eager")
    result = compiled(given(rows).rows.requires_grad_())
    with pytest.raises(GradientsRefused, match="no backward pass"):
        result.sum().backward()
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        compiled = torch.compile(of, backend=backend)
        with pytest.raises(Exception, match="gradients|jvp|INTERNAL ASSERT"):  # the last two are torch's own
            dual(compiled, given(rows).rows)
        inside = torch.compile(lambda y: torch.func.jvp(of, (y,), (y,)), backend=backend)  # noqa: B023
        with pytest.raises(Exception, match="gradients"):
            inside(given(rows).rows)
    torch._dynamo.reset()


def test_an_exported_graph_refuses_a_backward_pass() -> None:
    class Layer(torch.nn.Module):
        def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor, n: Tensor, gate_up: Tensor, down: Tensor):
            routing = Routing.from_topk(ids, weights, E, num_tokens=n)
            return ttnn_moe.moe(hidden, routing, Experts.dense(gate_up, down))

    x = given()
    inputs = (x.rows, x.ids, x.weights, x.num_tokens, x.gate_up, x.down)
    module = torch.export.export(Layer(), inputs).module()
    assert torch.equal(module(*inputs)[:3], ttnn_moe.moe(x.rows, x.bounded, x.experts)[:3])
    x.rows.requires_grad_()
    with pytest.raises(GradientsRefused):
        module(*inputs).sum().backward()
    with pytest.raises(GradientsRefused):
        dual(lambda y: module(y, *inputs[1:]), x.rows.detach())


@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("way", ["moe", "moe added", "up", "down out", "prepared"])
def test_make_fx_keeps_the_routing_an_input(way: str, pre_dispatch: bool) -> None:
    call, rows = CALLS[way]

    def of(rows: Tensor, ids: Tensor, out: Tensor, x: Given) -> Tensor:
        x.rows, x.ids, x.out = rows, ids, out
        return call(x)

    first, later = given(rows), given(rows, seed=1)
    later.weights, later.gate_up, later.down = first.weights, first.gate_up, first.down
    trace = make_fx(partial(of, x=given(rows)), pre_dispatch=pre_dispatch)
    if way == "prepared":
        with pytest.raises(ContractError, match="record this call.*dispatch mode"):
            trace(first.rows, first.ids, first.out)
        return
    graph = trace(first.rows, first.ids, first.out.clone())
    got, want = graph(later.rows, later.ids, later.out.clone()), call(later)
    n = 3 if way != "moe" else T
    assert torch.equal(got[:n], want[:n])


def test_one_call_with_gradients_leaves_a_prepared_layer_clean() -> None:
    x = given()
    layer: Prepared = ttnn_moe.prepare(Problem.of(T, K, x.experts, torch.float32), x.experts, Placement.uniform(E, 2))
    want = layer(x.rows, x.ids, x.weights)
    for _ in range(2):
        with pytest.raises(ContractError, match="no_grad"):
            layer(x.rows, x.ids, x.weights.clone().requires_grad_())
        with torch.no_grad():
            layer(x.rows, x.ids, x.weights.clone().requires_grad_())
        after = layer(x.rows, x.ids, x.weights)
        assert not after.requires_grad and torch.equal(after, want)


def test_the_stand_in_of_another_backend_refuses_alike() -> None:
    x = given()
    hidden, experts = x.rows.bfloat16(), Experts.dense(x.gate_up.bfloat16(), x.down.bfloat16())
    problem = Problem.of(T, K, experts, torch.bfloat16)
    with ascend_stand_in.registered():
        layer = ttnn_moe.prepare(problem, experts, backend="ascend")
        layer(hidden, x.ids, x.weights)
        with pytest.raises(ContractError, match="record this call"):
            layer(hidden.clone().requires_grad_(), x.ids, x.weights)
        result = ttnn_moe.moe(hidden.requires_grad_(), x.routing, experts, out=torch.empty(T, H), backend="ascend")
        with pytest.raises(GradientsRefused):
            result.sum().backward()


@pytest.mark.parametrize("way", ["moe out", "down added", "prepared out"])
def test_a_write_to_out_is_seen_by_who_saved_it(way: str) -> None:
    """As with torch's own in-place operators; a kernel that writes through an address would not be seen."""
    _check_seen(way)


@pytest.mark.parametrize("way", ["moe out", "down added", "prepared out"])
def test_a_write_through_an_address_is_seen_too(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*given: object, **_: object) -> None:
        out = next(tensor for tensor in reversed(given) if isinstance(tensor, Tensor))
        ctypes.memset(out.data_ptr(), 0, out.nbytes)

    monkeypatch.setattr(ReferenceBackend, "moe", write)
    monkeypatch.setattr(ReferenceBackend, "down_projection", write)
    monkeypatch.setattr(PreparedReference, "_run", write)
    _check_seen(way)


def _check_seen(way: str) -> None:
    call, rows = CALLS[way]
    x, factor = given(rows), torch.ones(T, H, requires_grad=True)
    product = factor * x.out
    call(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
