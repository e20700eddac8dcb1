"""A call of packed experts through the launches of a family, on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from assertions import assert_close
from host_kernels import HostKernels
from ttnn_moe import Problem, Routing
from ttnn_moe.backend import Numerics
from ttnn_moe.contract import Experts
from ttnn_moe.cuda.moe.family import Call
from ttnn_moe.selfcheck.oracle import oracle

BF16 = torch.bfloat16
EXPERTS, PAIRS = 4, 3
"""Of a layer, and of a token. Expert 2 has no token."""


def problem_of(experts: Experts, T: int) -> Problem:
    """fp32 output."""
    return Problem.of(T, PAIRS, experts, BF16, torch.float32)


def launch(kernels: HostKernels, monkeypatch: pytest.MonkeyPatch, family: Any, plan: Any, call: Call) -> None:
    """Launch a call with scratch full of NaN."""
    kernels.use(monkeypatch)
    buffers = []
    for buffer in family.scratch(plan):
        storage = torch.full((buffer.bytes + 128,), 0xFF, dtype=torch.uint8)  # lines of 128 bytes
        first = -storage.data_ptr() % 128
        buffers.append(storage[first : first + buffer.bytes].view(buffer.dtype).view(buffer.shape))
    family.launch(plan, call, tuple(buffers))


def worst(
    kernels: HostKernels,
    monkeypatch: pytest.MonkeyPatch,
    family: Any,
    plan: Any,
    hidden: Tensor,
    weights: Tensor,
    experts: Experts,
    *,
    few: bool,
    given: Experts | None = None,
    add: bool = False,
    bound: int | None = None,
) -> float:
    """0 if the call is within the bound of the oracle, else infinity.

    few: expert outputs are not rounded. given: what the kernels take, where it is not experts. bound: num_tokens.
    """
    T = len(hidden)
    ids = torch.tensor([0, 0, 1, 3])[torch.randint(0, 4, (T, PAIRS))].int()
    ids[T // 2, 0], ids[T // 3, 1] = -1, EXPERTS
    counted = ids.clone()
    if bound is not None:
        counted[bound:] = -1
    tokens = None if bound is None else torch.tensor(bound, dtype=torch.int32)
    routing = Routing.from_topk(ids, weights, EXPERTS, num_tokens=tokens)
    out = torch.randn(T, experts.H)
    start = out.clone()
    launch(kernels, monkeypatch, family, plan, Call(hidden, routing, given or experts, out, add))
    numerics = Numerics(activation=BF16, expert_out=None if few else BF16)
    want = oracle(hidden, counted, weights, experts, numerics, start if add else None)
    n = T if bound is None else bound
    try:
        assert_close(out[:n], want[:n], BF16, family.name)
    except AssertionError:
        return float("inf")
    return 0.0 if kernels.sound and torch.equal(out[n:], start[n:]) else float("inf")
