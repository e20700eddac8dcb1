"""What is measured: the protocol that our backends and every peer of benchmarks/peers follow, and our backends."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from .. import registry
from ..api import moe, prepare
from ..backend import Numerics
from ..contract import Problem, Routing
from ..errors import BackendUnavailable
from .layer import Layer, Weights

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


def why_not_on_cuda(device: str, module: str, package: str) -> str | None:
    """Why a peer that needs CUDA and a module cannot run here, or None. The module is not imported."""
    if device != "cuda":
        return "it runs on CUDA only"
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # its parent is absent
        found = None
    return None if found is not None else f"{package} is not installed"


class Implementation:
    """One way to compute an MoE layer from a routing that is given.

    Attributes:
        name: in the results.
        ours: whether it is this package.
        ids_dtype, weights_dtype: what it is handed as a router would make it, outside what is timed; None: the dtype
            of hidden.
    """

    name: str
    ours: ClassVar[bool] = False
    ids_dtype: torch.dtype = torch.int32
    weights_dtype: torch.dtype | None = torch.float32

    def available(self, device: str) -> str | None:
        """Why it cannot run on this machine's device ("cuda", "cpu"), or None. Cheap, and never raises."""
        return None

    def why_not(self, layer: Layer, T: int) -> str | None:
        """Why it does not run this layer with T tokens, or None."""
        return None

    def numerics(self, layer: Layer, T: int) -> Numerics | None:
        """The roundings that it declares, for the gate; None: none."""
        return None

    def prepare(self, layer: Layer, weights: Weights, T: int) -> Forward:
        """Ready for calls of T tokens: f(hidden [T, H], ids [T, K], weights [T, K]) -> [T, H].

        What is costly to make from the weights (another layout) goes into weights.once().
        """
        raise NotImplementedError


class Moe(Implementation):
    """ttnn_moe.moe: what a caller without preparation pays."""

    ours = True
    row = "moe"

    def __init__(self, backend: str, device: str):
        self.backend, self.device = backend, device
        self.name = f"ttnn_moe {backend} {self.row}"

    def available(self, device: str) -> str | None:
        found = registry.probe(self.backend)
        return None if found.available else found.reason

    def why_not(self, layer: Layer, T: int) -> str | None:
        return registry.why_not(self._problem(layer, T)).get(self.backend)

    def numerics(self, layer: Layer, T: int) -> Numerics | None:
        problem = self._problem(layer, T)
        return registry.choose(problem, self.backend).numerics(problem)

    def _problem(self, layer: Layer, T: int) -> Problem:
        return layer.problem(T, self.device)

    def prepare(self, layer: Layer, weights: Weights, T: int) -> Forward:
        experts = weights.experts

        def call(hidden: Tensor, ids: Tensor, scale: Tensor) -> Tensor:
            return moe(hidden, Routing.from_topk(ids, scale, layer.E), experts, backend=self.backend)

        return call


class Prepared(Moe):
    """ttnn_moe.prepare: a layer made ready once, then called."""

    row = "prepared"

    def prepare(self, layer: Layer, weights: Weights, T: int) -> Forward:
        return prepare(self._problem(layer, T), weights.experts, backend=self.backend)


def ours(device: str, backend: str = registry.AUTO, weight_format: str = "dense") -> list[Implementation]:
    """Our implementations on a device: of the backend named, or (auto) of all that can run these weights there.

    Raises:
        BackendUnavailable: the backend named is not here, or not for this device and these weights.
    """
    dtype = torch.float16 if weight_format == "dense" else torch.bfloat16
    small = Problem(1, 8, 1, 256, 256, dtype, weight_format=weight_format, device=device)
    reasons = registry.why_not(small)
    if backend != registry.AUTO:
        if backend not in registry.backends():
            registry.probe(backend)  # raises, naming those that exist
        if backend in reasons:
            what = device if weight_format == "dense" else f"{weight_format} weights on {device}"
            raise BackendUnavailable(f"backend {backend!r} cannot run on {what!r}: {reasons[backend]}")
    names = [name for name in registry.backends() if name not in reasons and backend in (registry.AUTO, name)]
    return [kind(name, device) for name in names for kind in (Moe, Prepared)]


def devices() -> Sequence[str]:
    """Devices that torch has here, the fastest first."""
    return ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]


def device_of(device: str | None, backend: str, weight_format: str = "dense") -> str:
    """The device asked for, or the first on which the backend runs these weights.

    Raises:
        BackendUnavailable: not here, or the backend does not run there.
    """
    if device is not None and device not in devices():
        raise BackendUnavailable("no such device here", got=repr(device), expected=f"one of {devices()}")
    for candidate in devices() if device is None else [device]:
        try:
            if ours(candidate, backend, weight_format):
                return candidate
            refused = BackendUnavailable(f"no backend runs {weight_format} weights on {candidate!r}")
        except BackendUnavailable as error:
            refused = error
    raise refused
