"""One experts module of transformers, run by ttnn_moe.moe. Its Experts is made at the first call and kept.

Weights are used where they are, and may be replaced, cast or moved between calls. Neither a module nor weights that it
let go of are kept alive from here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from loguru import logger
from torch import Tensor, nn

from ... import api, registry
from ...contract import Experts, Problem, Routing
from ...errors import BackendUnavailable, ContractError
from ...visible import shown
from .gate import Refusal, traits, why_not
from .mxfp4 import Mxfp4Experts
from .mxfp4 import experts_of as mxfp4_experts

_DENSE = ("gate_up", "down")
DISTINCT = ("Qwen3MoeExperts",)
_PACKED_REMEDY = (
    "load the model again with one of transformers' own, as from_pretrained(..., experts_implementation='eager')"
)
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
                remedy = refusal.remedy or _remedy(self)
                raise ValueError(f"{name} cannot serve {type(self).__name__}: {refusal.why}. {remedy}")
            experts = _experts(self, {key: _flat(tensor) for key, tensor in _weights(self).items()})
        else:
            # held until the call is done
            bound, held = _bound(self, name, backend, top_k_index.shape[-1], hidden_states.dtype)
            experts = bound.experts
        dtype = hidden_states.dtype
        if experts.dtype not in (None, dtype):
            # under autocast hidden_states have the dtype that the layers before gave them
            if torch.is_autocast_enabled(hidden_states.device.type):
                hidden_states = hidden_states.to(experts.dtype)
            else:
                raise ContractError(
                    f"{name} got hidden states of another dtype than the expert weights",
                    got=f"{dtype} and {experts.dtype}",
                    expected="one dtype",
                    remedy="load the whole model in one, from_pretrained(..., dtype=torch.bfloat16)",
                )
        routing = Routing.from_topk(top_k_index, top_k_weights, experts.E)
        return api.moe(hidden_states, routing, experts, backend=backend, ids=_promise(self)).to(dtype)

    return forward


def _promise(module: nn.Module) -> str:
    """What is known of a module's ids: the router of DISTINCT names K experts of its own by topk.

    Expert parallelism marks experts of other ranks; it needs a process group.
    """
    known = type(module).__name__ in DISTINCT and type(module).__module__.startswith("transformers.")
    alone = not (dist.is_available() and dist.is_initialized())
    return "distinct" if known and alone else "any"


def served(model: nn.Module) -> dict[str, str]:
    """Which experts modules of a model the operator runs: module name -> backend of its first call.

    Modules that have not run, those that `set_experts_implementation` gave to another, and calls inside torch.compile
    are not in it.

    Raises:
        ContractError: model is no module.
    """
    if not isinstance(model, nn.Module):
        raise ContractError("no model", got=shown(model), expected="a torch.nn.Module")
    return {
        name: bound.backend
        for name, module in model.named_modules()
        if (bound := _BOUND.get(module)) is not None and _implementation(module) in (None, bound.asked[0])
    }


def _implementation(module: nn.Module) -> str | None:
    """The experts implementation that a module asks transformers for; None: it does not say."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


class _Weights(Mapping[str, Tensor]):
    """The tensors of an Experts, held weakly: offloading replaces weights so that they are freed."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._refs = {name: weakref.ref(tensor) for name, tensor in tensors.items()}

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._refs[name]()
        assert tensor is not None, "a module holds its weights while it runs"
        return _flat(tensor)

    def __contains__(self, name: object) -> bool:
        return name in self._refs

    def __iter__(self) -> Iterator[str]:
        return iter(self._refs)

    def __len__(self) -> int:
        return len(self._refs)


def _held(module: Any) -> tuple[Tensor, ...]:
    """A module's tensors, as they lie; None in place of one that is not there."""
    if type(module) is Mxfp4Experts:
        return tuple(module.tensors().values())
    return getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)  # type: ignore[return-value]


def _weights(module: Any) -> dict[str, Tensor]:
    """The same by their names in Experts."""
    return module.tensors() if type(module) is Mxfp4Experts else dict(zip(_DENSE, _held(module), strict=True))


def _flat(tensor: Tensor) -> Tensor:
    """Blocks [E, R, C/32, 16] as [E, R, C/2]; other tensors as they are."""
    return tensor.flatten(2) if tensor.dim() == 4 else tensor


def _experts(module: nn.Module, tensors: Mapping[str, Tensor]) -> Experts:
    if type(module) is Mxfp4Experts:
        return mxfp4_experts(tensors, module.arranged)
    E, H, I = tensors["down"].shape
    return Experts("dense", E, H, I, tensors)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """What .to() and an assignment to .data change under one Parameter."""
    return tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride()


class _Bound:
    """A module's Experts, and by what to tell that they are still right."""

    __slots__ = ("experts", "known", "traits", "asked", "backend")

    def __init__(
        self, module: nn.Module, tensors: Mapping[str, Tensor], name: str, backend: str, K: int, dtype: torch.dtype
    ):
        self.experts = _experts(module, _Weights(tensors))
        self.known = [(weakref.ref(tensor), _form(tensor)) for tensor in tensors.values()]
        self.traits, self.asked = traits(module), (name, backend)
        problem = Problem.of(1, K, self.experts, self.experts.dtype or dtype)
        try:
            self.backend = registry.choose(problem, backend).name
        except BackendUnavailable as error:
            what = f"{name} cannot run {type(module).__name__} on {self.experts.device}: {error.what}"
            remedy = error.remedy and f"{error.remedy}; or {_remedy(module)}"
            raise BackendUnavailable(what, remedy=remedy, details=error.details) from error

    def fits(self, module: nn.Module, held: tuple[Tensor, ...], name: str, backend: str) -> bool:
        # traits are the first: they tell whether there are weights
        if self.traits != traits(module) or self.asked != (name, backend):
            return False
        for (ref, form), tensor in zip(self.known, held, strict=True):
            if ref() is not tensor or form != _form(tensor):
                return False
        return True


_BOUND: weakref.WeakKeyDictionary[nn.Module, _Bound] = weakref.WeakKeyDictionary()


def _bound(module: nn.Module, name: str, backend: str, K: int, dtype: torch.dtype) -> tuple[_Bound, tuple[Tensor, ...]]:
    """The module's _Bound, made anew if anything changed, and its weights, alive for the time of the call."""
    bound = _BOUND.get(module)
    if bound is not None:
        held = _held(module)
        if bound.fits(module, held, name, backend):
            return bound, held
        _BOUND.pop(module, None)
    refusal = why_not(module)
    if refusal is not None:
        raise _error(name, module, refusal)
    tensors = _weights(module)
    bound = _BOUND[module] = _Bound(module, tensors, name, backend, K, dtype)
    experts = bound.experts
    logger.debug(
        "{} runs {} (E={}, H={}, I={}, {} on {}) on backend {}",
        name,
        type(module).__name__,
        *experts.sizes,
        experts.dtype or experts.format,
        experts.device,
        bound.backend,
    )
    return bound, tuple(tensors.values())


def _remedy(module: nn.Module) -> str:
    """Another way to run a module: transformers' own code does not read packed experts."""
    return _PACKED_REMEDY if isinstance(module, Mxfp4Experts) else _REMEDY


def _error(name: str, module: nn.Module, refusal: Refusal) -> ContractError:
    what = f"{name} cannot serve {type(module).__name__}: {refusal.why}"
    return ContractError(what, got=refusal.got, expected=refusal.expected, remedy=refusal.remedy or _remedy(module))
