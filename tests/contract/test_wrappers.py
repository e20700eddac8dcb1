"""Tensor subclasses that only wrap other tensors: kernels would read address 0, so each entry point refuses them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from test_kinds import CALLS, IDS, WEIGHTS, X
from torch.utils._pytree import tree_map

import ttnn_moe
from ttnn_moe import Experts, Routing
from ttnn_moe.errors import ContractError

NAMES = ("hidden", "out", "dense", "mxfp4", "silu_mul", "ids", "weights", "prepared hidden", "prepared ids")
PLAIN = {"ids": IDS, "weights": WEIGHTS, "prepared ids": IDS, "prepared weights": WEIGHTS}


class Wrapper(torch.Tensor):
    """As the quantised tensors of torchao are made; what torch computes with it is right."""

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)  # type: ignore[attr-defined]

    def __init__(self, held: torch.Tensor):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: x.held if isinstance(x, Wrapper) else x, (args, kwargs or {}))
        return function(*args, **kwargs)


class Named(torch.Tensor):
    """A subclass with memory."""


def masked(x: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls masked tensors a prototype
        return torch.masked.masked_tensor(x, torch.ones_like(x, dtype=torch.bool))


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("name", [*NAMES, "prepared weights", "prepared out"])
@pytest.mark.parametrize("wrap", [Wrapper, masked])
def test_a_wrapper_is_refused(wrap: Any, name: str, gradients: bool) -> None:
    call, _ = CALLS[name]
    message = "is a tensor without memory of its own; got a .*; expected a torch tensor .*; to fix it: pass the tensor"
    with torch.set_grad_enabled(gradients), pytest.raises(ContractError, match=message):
        call(wrap(PLAIN.get(name, X)))


def test_a_subclass_with_memory_is_a_tensor() -> None:
    experts = Experts.dense(torch.randn(4, 16, 16), torch.randn(4, 16, 8))
    want = ttnn_moe.moe(X, Routing.from_topk(IDS, WEIGHTS, 4), experts)
    routing = Routing.from_topk(IDS.as_subclass(Named), WEIGHTS.as_subclass(Named), 4)
    named = Experts.dense(*(tensor.as_subclass(Named) for tensor in experts.tensors.values()))
    assert torch.equal(ttnn_moe.moe(X.as_subclass(Named), routing, named).as_subclass(torch.Tensor), want)


def test_no_tokens_need_no_memory() -> None:
    experts = Experts.dense(torch.randn(4, 16, 16), torch.randn(4, 16, 8))
    routing = Routing.from_topk(IDS[:0], WEIGHTS[:0], 4)
    assert ttnn_moe.moe(X[:0].as_subclass(Named), routing, experts).shape == (0, 16)
