"""One experts module of transformers, run by ttnn_moe.moe. Its Experts is made at the first call and kept.

Weights are used where they are, and may be replaced, cast or moved between calls. Neither a module nor weights that it
let go of are kept alive from here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from loguru import logger
from torch import Tensor, nn

from ... import api, registry
from ...contract import Experts, Problem, Routing
from ...errors import BackendUnavailable, ContractError
from .gate import Refusal, traits, why_not

_REMEDY = 'take one of transformers\' own: model.set_experts_implementation("grouped_mm"), or "eager"'


def experts_forward(name: str, backend: str) -> Callable[[nn.Module, Tensor, Tensor, Tensor], Tensor]:
    """The function to register as experts implementation `name`, on that backend."""

    def forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [T, H], top_k_index [T, K], top_k_weights [T, K] -> [T, H] in the dtype of hidden_states.

        An index outside 0 .. num_experts-1 adds nothing: so expert parallelism marks experts of other ranks.

        Raises:
            ContractError: the operator does not compute what this module does. BackendUnavailable: nothing can run it.
        """
        if torch.compiler.is_compiling():
            refusal = why_not(self)
            if refusal is not None:
                # a class that the compiler knows: it shows the message
                raise ValueError(f"{name} cannot serve {type(self).__name__}: {refusal.why}. {_REMEDY}")
            gate_up, down = _weights(self)
            experts = Experts.dense(gate_up, down)
        else:
            bound = _bound(self, name, backend, top_k_index.shape[-1])
            gate_up, down = bound[1:]
            experts = bound[0].experts
        if hidden_states.dtype != gate_up.dtype:
            raise ContractError(
                f"{name} got hidden states of another dtype than the expert weights",
                got=f"{hidden_states.dtype} and {gate_up.dtype}",
                expected="one dtype",
                remedy="load the whole model in one, from_pretrained(..., dtype=torch.bfloat16), without autocast",
            )
        routing = Routing.from_topk(top_k_index, top_k_weights, experts.E)
        return api.moe(hidden_states, routing, experts, backend=backend)

    return forward


def served(model: nn.Module) -> dict[str, str]:
    """Which experts modules of a model the operator has run: module name -> backend of its first call.

    Modules that have not run, and calls inside torch.compile, are not in it.
    """
    return {name: _BOUND[module].backend for name, module in model.named_modules() if module in _BOUND}


class _Weights(Mapping[str, Tensor]):
    """The tensors of an Experts, held weakly: offloading replaces weights so that they are freed."""

    def __init__(self, gate_up: Tensor, down: Tensor):
        self._refs = {"gate_up": weakref.ref(gate_up), "down": weakref.ref(down)}

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._refs[name]()
        assert tensor is not None, "a module holds its weights while it runs"
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._refs)

    def __len__(self) -> int:
        return len(self._refs)

    def are(self, gate_up: Tensor, down: Tensor) -> bool:
        return self._refs["gate_up"]() is gate_up and self._refs["down"]() is down


def _weights(module: Any) -> tuple[Tensor, Tensor]:
    """gate_up_proj [E, 2I, H] and down_proj [E, H, I]; None in place of one that is not there."""
    return getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)  # type: ignore[return-value]


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """What .to() and an assignment to .data change under one Parameter."""
    return tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride()


class _Bound:
    """A module's Experts, and by what to tell that they are still right."""

    __slots__ = ("experts", "weights", "forms", "traits", "asked", "backend")

    def __init__(self, module: nn.Module, gate_up: Tensor, down: Tensor, name: str, backend: str, K: int):
        E, H, I = down.shape
        self.weights = _Weights(gate_up, down)
        self.experts = Experts("dense", E, H, I, self.weights)
        self.forms = (_form(gate_up), _form(down))
        self.traits, self.asked = traits(module), (name, backend)
        problem = Problem.of(1, K, self.experts, gate_up.dtype)
        try:
            self.backend = registry.choose(problem, backend).name
        except BackendUnavailable as error:
            what = f"{name} cannot run {type(module).__name__} on {gate_up.device}: {error.what}"
            remedy = error.remedy and f"{error.remedy}; or {_REMEDY}"
            raise BackendUnavailable(what, remedy=remedy, details=error.details) from error

    def fits(self, module: nn.Module, gate_up: Tensor, down: Tensor, name: str, backend: str) -> bool:
        return (
            self.traits == traits(module)  # the first: it tells whether there are weights
            and self.weights.are(gate_up, down)
            and self.forms == (_form(gate_up), _form(down))
            and self.asked == (name, backend)
        )


_BOUND: weakref.WeakKeyDictionary[nn.Module, _Bound] = weakref.WeakKeyDictionary()


def _bound(module: nn.Module, name: str, backend: str, K: int) -> tuple[_Bound, Tensor, Tensor]:
    """The module's _Bound, made anew if anything changed, and its weights, alive for the time of the call."""
    bound = _BOUND.get(module)
    if bound is not None:
        gate_up, down = _weights(module)
        if bound.fits(module, gate_up, down, name, backend):
            return bound, gate_up, down
        _BOUND.pop(module, None)
    refusal = why_not(module)
    if refusal is not None:
        raise _error(name, module, refusal)
    gate_up, down = _weights(module)
    bound = _BOUND[module] = _Bound(module, gate_up, down, name, backend, K)
    logger.debug(
        "{} runs {} (E={}, H={}, I={}, {} on {}) on backend {}",
        name,
        type(module).__name__,
        *bound.experts.sizes,
        gate_up.dtype,
        gate_up.device,
        bound.backend,
    )
    return bound, gate_up, down


def _error(name: str, module: nn.Module, refusal: Refusal) -> ContractError:
    what = f"{name} cannot serve {type(module).__name__}: {refusal.why}"
    return ContractError(what, got=refusal.got, expected=refusal.expected, remedy=_REMEDY)
