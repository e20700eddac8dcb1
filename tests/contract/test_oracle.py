"""The oracle and the metric themselves: each declared rounding shows, and an error of one token does."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from ttnn_moe.backend import Numerics
from ttnn_moe.selfcheck.bounds import BOUND, token_errors, worst_error
from ttnn_moe.selfcheck.edges import CASES
from ttnn_moe.selfcheck.oracle import oracle

INPUTS = CASES[0].make(torch.float32)


def _want(numerics: Numerics | None) -> torch.Tensor:
    return oracle(INPUTS.hidden, INPUTS.ids, INPUTS.weights, INPUTS.experts, numerics)


@pytest.mark.parametrize(
    ("field", "kind", "most"),
    [
        *(
            (field.name, torch.bfloat16, BOUND[torch.bfloat16])
            for field in fields(Numerics)
            if field.name != "operands"
        ),
        ("operands", "mxfp8", 0.1),
        ("operands", "mxfp4", 0.5),
    ],
)
def test_every_declared_rounding_changes_the_result(field: str, kind: Any, most: float) -> None:
    plain = _want(Numerics())
    assert worst_error(plain, _want(None)) < 1e-6
    rounded = _want(replace(Numerics(), **{field: kind}))
    assert 1e-4 < worst_error(rounded, plain) < most


def test_routing_weights_are_rounded_before_they_are_used() -> None:
    """Tenstorrent declares them bf16: the result is that of bf16 weights, exactly."""
    x = INPUTS
    rounded = oracle(x.hidden, x.ids, x.weights.bfloat16().float(), x.experts, Numerics())
    assert torch.equal(_want(Numerics(routing_weight=torch.bfloat16)), rounded)
    assert not torch.equal(_want(Numerics()), rounded)


def test_the_oracle_is_the_formula_of_one_pair_after_another() -> None:
    x, want = INPUTS, _want(None)
    for t in range(len(x.hidden)):
        total = torch.zeros(x.experts.H, dtype=torch.float64)
        for e, w in zip(x.ids[t].tolist(), x.weights[t].double(), strict=True):
            gate_up, down = (tensor[e].double() for tensor in x.experts.tensors.values())
            gate, up = (gate_up @ x.hidden[t].double()).chunk(2)
            total += w * (down @ (gate * torch.sigmoid(gate) * up))
        torch.testing.assert_close(want[t], total)


def test_a_token_without_an_expert_must_be_zero() -> None:
    want = torch.ones(3, 4)
    want[1] = 0
    out = want.clone()
    assert token_errors(out, want).tolist() == [0, 0, 0]
    out[1, 2] = 1e-30
    assert token_errors(out, want).tolist() == [0, float("inf"), 0]
