"""The custom ops: opcheck, torch.compile(fullgraph=True), and a refused backward pass."""

from __future__ import annotations

import pytest
import torch

import ttnn_moe
from targets import Target
from ttnn_moe import ContractError, Experts, Routing, torch_ops
from ttnn_moe.selfcheck.edges import Case

CASE = Case("small", T=9, E=4, K=2, H=32, I=16)


def args(target: Target, dtype: torch.dtype):
    x = CASE.make(dtype).to(target.device)
    return x, Routing.from_topk(x.ids, x.weights, CASE.E)


@pytest.mark.parametrize("name", ["moe", "moe_out", "gate_projection", "up_projection", "gate_up", "silu_mul", "down"])
def test_opcheck(runnable: Target, name: str) -> None:
    dtype = runnable.dtypes[0]
    x, routing = args(runnable, dtype)
    num_tokens = torch.tensor(5, dtype=torch.int32, device=runnable.device)
    held = (list(x.experts.tensors.values()), x.experts.sizes, x.experts.spec, runnable.backend)
    common = (x.ids, x.weights, None, *held)
    align = runnable.row_align
    capacity = routing.step_layout(align).capacity
    rows = torch.randn(capacity, CASE.I, device=runnable.device).to(dtype)
    out = torch.randn(CASE.T, CASE.H, device=runnable.device).to(dtype)
    op, arguments = {
        "moe": (torch_ops.MOE, (x.hidden, *common, None, False, False, True)),
        "moe_out": (torch_ops.MOE, (x.hidden, x.ids, x.weights, num_tokens, *held, out, True, False, False)),
        "silu_mul": (torch_ops.SILU_MUL, (rows, rows.clone(), runnable.backend)),
        "down": (torch_ops.DOWN_PROJECTION, (rows, *common, align, out, False, False)),
        **{step: (op, (x.hidden, *common, align)) for step, op in torch_ops.STEPS.items()},
    }[name]
    torch.library.opcheck(op, arguments)


def test_compiled_whole(runnable: Target) -> None:
    """The front-end itself traces: Routing and Experts are made inside the compiled function."""
    x, routing = args(runnable, runnable.dtypes[0])
    name = runnable.backend

    def layer(hidden, ids, weights, gate_up, down):
        experts = Experts.dense(gate_up, down)
        return 2 * ttnn_moe.moe(hidden, Routing.from_topk(ids, weights, CASE.E), experts, backend=name)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    want = 2 * ttnn_moe.moe(x.hidden, routing, x.experts, backend=name)
    got = compiled(x.hidden, x.ids, x.weights, *x.experts.tensors.values())
    assert torch.equal(got, want)


def test_compiled_steps_and_out(runnable: Target) -> None:
    x, routing = args(runnable, runnable.dtypes[0])
    name, align = runnable.backend, runnable.row_align

    def steps(hidden, ids, weights, out):
        r = Routing.from_topk(ids, weights, CASE.E)
        gate = ttnn_moe.gate_projection(hidden, r, x.experts, row_align=align, backend=name)
        up = ttnn_moe.up_projection(hidden, r, x.experts, row_align=align, backend=name)
        act = ttnn_moe.silu_mul(gate, up, backend=name)
        ttnn_moe.down_projection(act, r, x.experts, row_align=align, out=out, accumulate=True, backend=name)
        act = ttnn_moe.gate_up(hidden, r, x.experts, row_align=align, backend=name)
        ttnn_moe.down_projection(act, r, x.experts, row_align=align, out=out, accumulate=True, backend=name)
        ttnn_moe.moe(hidden, r, x.experts, out=out, accumulate=True, backend=name)
        return out + 1

    compiled = torch.compile(steps, fullgraph=True, backend="aot_eager")
    outs = [torch.ones(CASE.T, CASE.H, dtype=x.hidden.dtype, device=runnable.device) for _ in range(2)]
    want = steps(x.hidden, x.ids, x.weights, outs[0])
    got = compiled(x.hidden, x.ids, x.weights, outs[1])
    assert torch.equal(got, want)
    assert torch.equal(outs[0], outs[1])


def test_dynamic_token_count(runnable: Target) -> None:
    """One compiled graph serves every T."""
    x, _ = args(runnable, runnable.dtypes[0])
    graphs = []

    def count(graph, example):
        graphs.append(graph)
        return graph

    @torch.compile(fullgraph=True, dynamic=True, backend=count)
    def layer(hidden, ids, weights):
        return ttnn_moe.moe(hidden, Routing.from_topk(ids, weights, CASE.E), x.experts, backend=runnable.backend)

    for T in (9, 5, 7):
        hidden, ids, weights = (tensor[:T].clone() for tensor in (x.hidden, x.ids, x.weights))
        want = ttnn_moe.moe(hidden, Routing.from_topk(ids, weights, CASE.E), x.experts, backend=runnable.backend)
        assert torch.equal(layer(hidden, ids, weights), want)
    assert len(graphs) == 1


def test_backward_is_refused_not_wrong() -> None:
    x, routing = args(Target("reference"), torch.float32)
    hidden = x.hidden.requires_grad_()
    out = ttnn_moe.moe(hidden, routing, x.experts)
    assert torch.equal(out.detach(), ttnn_moe.moe(hidden.detach(), routing, x.experts))
    with pytest.raises(RuntimeError, match="no backward pass"):
        out.sum().backward()


HIDDEN, IDS, WEIGHTS = (
    torch.randn(CASE.T, CASE.H),
    torch.zeros(CASE.T, CASE.K, dtype=torch.int64),
    torch.ones(CASE.T, 2),
)
EXPERTS = Experts.dense(torch.randn(CASE.E, 2 * CASE.I, CASE.H), torch.randn(CASE.E, CASE.H, CASE.I))


def layer_of(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, **options: object) -> torch.Tensor:
    return ttnn_moe.moe(hidden, Routing.from_topk(ids, weights, CASE.E), EXPERTS, **options)  # type: ignore[arg-type]


REFUSED = {
    "hidden has the wrong shape; got (3, 32); expected [T, H] = (9, 32)": ((HIDDEN[:3], IDS, WEIGHTS), {}),
    "flatten batch and sequence to T: hidden.reshape(-1, H)": ((HIDDEN[None], IDS, WEIGHTS), {}),
    "have different dtypes; got torch.bfloat16 and torch.float32": ((HIDDEN.bfloat16(), IDS, WEIGHTS), {}),
    "do not fit together; got (3, 2) and (9, 2)": ((HIDDEN, IDS[:3], WEIGHTS), {}),
    "got out=None; expected out [T, H]": ((HIDDEN, IDS, WEIGHTS), {"accumulate": True}),
}


@pytest.mark.parametrize("text", REFUSED)
def test_torch_compile_shows_what_is_wrong(text: str) -> None:
    """fullgraph=True: in torch's own error, as dynamo raises no other. Else the graph breaks, and the error is ours."""
    inputs, options = REFUSED[text]
    torch._dynamo.reset()
    whole = torch.compile(layer_of, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError) as error:
        whole(*inputs, **options)
    assert text in str(error.value)
    torch._dynamo.reset()
    with pytest.raises(ContractError) as ours:
        torch.compile(layer_of, backend="aot_eager")(*inputs, **options)
    assert text in str(ours.value)
