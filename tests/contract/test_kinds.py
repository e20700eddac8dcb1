"""Arguments of another kind than the operator takes: each is an error of the package's own, in every entry point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ttnn_moe
from ttnn_moe import Experts, Problem, Routing
from ttnn_moe.errors import ContractError

T, E, K, H, I = 5, 4, 2, 16, 8
X, IDS, WEIGHTS = torch.randn(T, H), torch.randint(0, E, (T, K)), torch.rand(T, K)
ROUTING, EXPERTS = (Routing.from_topk(IDS, WEIGHTS, E), Experts.dense(torch.randn(E, 2 * I, H), torch.randn(E, H, I)))
PROBLEM = Problem(T, E, K, H, I, torch.float32)
LAYER = ttnn_moe.prepare(PROBLEM, EXPERTS)
ACTIVATIONS = ttnn_moe.gate_up(X, ROUTING, EXPERTS)
ODD: list[Any] = [None, 3, 2.0, "x", [[1.0]], X.numpy(), object()]
PROMISES = [*ODD, True, "", "Distinct", b"any", ["any"]]
DENSE = [torch.zeros(E, 2 * I, H).to_sparse()]
SPARSE = [X.to_sparse(), X.to_sparse_csr(), X.to_mkldnn(), torch.nested.nested_tensor([X[:2], X[2:]])]

CALLS: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
    "hidden": (lambda v: ttnn_moe.moe(v, ROUTING, EXPERTS), ODD + SPARSE),
    "routing": (lambda v: ttnn_moe.moe(X, v, EXPERTS), ODD),
    "experts": (lambda v: ttnn_moe.moe(X, ROUTING, v), ODD),
    "out": (lambda v: ttnn_moe.moe(X, ROUTING, EXPERTS, out=v), [*ODD[1:], *SPARSE]),
    "accumulate": (lambda v: ttnn_moe.moe(X, ROUTING, EXPERTS, out=X.clone(), accumulate=v), ODD),
    "ids of moe": (lambda v: ttnn_moe.moe(X, ROUTING, EXPERTS, ids=v), PROMISES),
    "ids of prepare": (lambda v: ttnn_moe.prepare(PROBLEM, EXPERTS, ids=v), PROMISES),
    "row_align": (lambda v: ttnn_moe.gate_up(X, ROUTING, EXPERTS, row_align=v), [0, -1, 1.5, 2.0, True, 10**20]),
    "silu_mul": (lambda v: ttnn_moe.silu_mul(v, v), ODD + SPARSE),
    "activations": (lambda v: ttnn_moe.down_projection(v, ROUTING, EXPERTS), [*ODD, ACTIVATIONS.to_sparse()]),
    "ids": (lambda v: Routing.from_topk(v, WEIGHTS, E), [*ODD, IDS.to_sparse()]),
    "weights": (lambda v: Routing.from_topk(IDS, v, E), [*ODD, WEIGHTS.to_sparse()]),
    "E": (lambda v: Routing.from_topk(IDS, WEIGHTS, v), [0, -1, 4.0, True]),
    "num_tokens": (lambda v: Routing.from_topk(IDS, WEIGHTS, E, num_tokens=v), [3, 2.0, "x", X]),
    "checked ids": (
        lambda v: Routing.from_topk(v, WEIGHTS.to(v.device), E, check=True),
        [IDS.to_sparse(), IDS.to("meta")],
    ),
    "dense": (lambda v: Experts.dense(v, v), [*ODD, *DENSE]),
    "projections": (lambda v: Experts.from_projections(v, v, v.mT if v.layout is torch.strided else v), DENSE[:1]),
    "device": (EXPERTS.to, ["hpu", "nonesuch", 5.5]),
    "mxfp4": (lambda v: Experts.mxfp4(v, v, v, v), ODD + SPARSE),
    "problem": (lambda v: ttnn_moe.prepare(v, EXPERTS), ODD),
    "prepared experts": (lambda v: ttnn_moe.prepare(PROBLEM, v), ODD),
    "T": (lambda v: Problem(v, E, K, H, I, torch.float32), [*ODD[:1], *ODD[2:], 5.0, True, -1, torch.tensor(5)]),
    "H": (lambda v: Problem(T, E, K, v, I, torch.float32), [16.0, float("nan"), True, 0]),
    "D": (lambda v: Problem(T, E, K, H, I, torch.float32, D=v), [1.0, True, "1", 0]),
    "prepared hidden": (lambda v: LAYER(v, IDS, WEIGHTS), ODD + SPARSE),
    "prepared ids": (lambda v: LAYER(X, v, WEIGHTS), ODD),
    "prepared weights": (lambda v: LAYER(X, IDS, v), ODD),
    "prepared out": (lambda v: LAYER(X, IDS, WEIGHTS, out=v), ODD[1:]),
}


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_another_kind_is_refused(name: str, gradients: bool) -> None:
    call, values = CALLS[name]
    for value in values:
        with torch.set_grad_enabled(gradients), pytest.raises(ContractError):
            call(value)
