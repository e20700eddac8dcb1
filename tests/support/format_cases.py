"""What every weight format owes the operator, on the reference backend."""

from __future__ import annotations

import torch

import ttnn_moe
from assertions import assert_close
from ttnn_moe import Problem, registry
from ttnn_moe.selfcheck.bounds import poisoned
from ttnn_moe.selfcheck.edges import Case, Inputs
from ttnn_moe.selfcheck.oracle import oracle


def check_against_oracle(case: Case, x: Inputs, steps: bool = True) -> None:
    """moe, a prepared layer twice, and the steps of SiLU, against the oracle; equal calls give equal bits."""
    dtype, H = x.hidden.dtype, x.experts.H
    routing, n = x.routing(), case.T if x.num_tokens is None else x.num_tokens
    good = [t for t in range(n) if t not in x.spoiled]
    want = oracle(x.hidden, x.counted_ids, x.weights, x.experts, registry.choose(x.problem, "auto").numerics(x.problem))
    layer = ttnn_moe.prepare(Problem.of(case.T + 5, case.K, x.experts, dtype), x.experts)
    outs = [poisoned(case.T, H, dtype=dtype) for _ in range(3)]
    ttnn_moe.moe(x.hidden, routing, x.experts, out=outs[0])
    for out in outs[1:]:  # the second call finds a used workspace
        layer(x.hidden, x.ids, x.weights, out=out, num_tokens=routing.num_tokens)
    for out in outs:
        assert torch.equal(out.view(torch.uint8), outs[0].view(torch.uint8)), "two runs differ"
    assert_close(outs[0][good], want[good], dtype)
    assert not any(outs[0][t].isfinite().all() for t in x.spoiled)
    if steps and x.num_tokens is None:
        parts = (step(x.hidden, routing, x.experts) for step in (ttnn_moe.gate_projection, ttnn_moe.up_projection))
        act = ttnn_moe.silu_mul(*parts)
        for rows in (act, ttnn_moe.gate_up(x.hidden, routing, x.experts)):
            assert_close(ttnn_moe.down_projection(rows, routing, x.experts)[good], want[good], dtype)


def check_workspace(x: Inputs, expert_bytes: int) -> None:
    """A prepared layer's second call allocates nothing as large as one expert's bytes."""
    layer = ttnn_moe.prepare(x.problem, x.experts)
    layer(x.hidden, x.ids, x.weights)
    with torch.profiler.profile(profile_memory=True) as profile:
        out = layer(x.hidden, x.ids, x.weights)
    taken = [event.self_cpu_memory_usage for event in profile.events() if event.self_cpu_memory_usage > 0]
    # the sum over k converts its rows to fp32
    assert max(taken) <= 2 * out.nbytes < expert_bytes
