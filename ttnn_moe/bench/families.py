"""One family of CUDA kernels as an implementation, whether or not the backend would choose it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backend import Numerics
from ..contract import Routing
from ..cuda.arch import Target, target_of
from ..cuda.moe.family import Call, Family, numerics_of
from .implementations import Forward, Implementation
from .layer import Layer, Weights


class OfFamily(Implementation):
    """A family with its own plan; a subclass may make another."""

    ours = True

    def __init__(self, family: Family[Any], name: str | None = None):
        self.family, self.name = family, name or family.name

    def target(self) -> Target:
        return target_of()

    def why_not(self, layer: Layer, T: int) -> str | None:
        problem = layer.problem(T, "cuda")
        if self.family.weight_format != problem.weight_format:
            return f"it runs {self.family.weight_format} weights, not {problem.weight_format!r}"
        return self.family.why_not(problem, self.target())

    def numerics(self, layer: Layer, T: int) -> Numerics | None:
        return numerics_of(self.family, layer.problem(T, "cuda"))

    def plan(self, layer: Layer, T: int) -> Any:
        return self.family.plan(layer.problem(T, "cuda"), self.target())

    def prepare(self, layer: Layer, weights: Weights, T: int) -> Forward:
        plan, experts = self.plan(layer, T), weights.experts
        # calls of one plan follow one another
        buffers = tuple(torch.empty(b.shape, dtype=b.dtype, device="cuda") for b in self.family.scratch(plan))

        def call(hidden: Tensor, ids: Tensor, scale: Tensor) -> Tensor:
            out = torch.empty_like(hidden)
            routing = Routing.from_topk(ids, scale, layer.E)
            self.family.launch(plan, Call(hidden, routing, experts, out, False), buffers)
            return out

        return call
