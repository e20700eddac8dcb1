"""Backends that are wrong, for what must notice it."""

from __future__ import annotations

import torch
from torch import Tensor

from ttnn_moe.reference import PreparedReference, ReferenceBackend


class Forgetful(ReferenceBackend):
    """Leaves the last token out of its result."""

    name = "forgetful"

    def moe(self, hidden, routing, experts, out: Tensor, accumulate: bool) -> None:
        super().moe(hidden, routing, experts, out, accumulate)
        out[-1:] = 0


class Overwrites(ReferenceBackend):
    """Never adds to out."""

    name = "overwrites"

    def moe(self, hidden, routing, experts, out: Tensor, accumulate: bool) -> None:
        super().moe(hidden, routing, experts, out, False)

    def down_projection(self, activations, routing, experts, row_align, out: Tensor, accumulate: bool) -> None:
        super().down_projection(activations, routing, experts, row_align, out, False)


class Narrow(ReferenceBackend):
    """Takes every out for one in bf16."""

    name = "narrow"

    def moe(self, hidden, routing, experts, out: Tensor, accumulate: bool) -> None:
        super().moe(hidden, routing, experts, out.view(torch.bfloat16)[:, : out.shape[1]], accumulate)


class Overflows(ReferenceBackend):
    """SiLU as x e^x / (1 + e^x)."""

    name = "overflows"

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        e = gate.float().exp()
        return (gate * e / (1 + e) * up).to(gate.dtype)


class Adds(ReferenceBackend):
    """Adds 1 to tokens that name no expert, in the down projection."""

    name = "adds"

    def down_projection(self, activations, routing, experts, row_align, out: Tensor, accumulate: bool) -> None:
        super().down_projection(activations, routing, experts, row_align, out, accumulate)
        out[(routing.topk_ids < 0).all(1)] += 1


class Remembers(ReferenceBackend):
    """A prepared layer returns what its first call of as many tokens made."""

    name = "remembers"

    def prepare(self, problem, experts, placement) -> PreparedReference:
        class Layer(PreparedReference):
            made: dict[int, Tensor] = {}

            def _run(self, hidden, routing, out: Tensor, accumulate: bool) -> None:
                if len(hidden) not in self.made:
                    super()._run(hidden, routing, out, accumulate)
                    self.made[len(hidden)] = out.clone()
                out.copy_(self.made[len(hidden)])

        return Layer(self, problem, experts, placement)


class Unbounded(ReferenceBackend):
    """A prepared layer writes every row of out."""

    name = "unbounded"

    def prepare(self, problem, experts, placement) -> PreparedReference:
        class Layer(PreparedReference):
            def _run(self, hidden, routing, out: Tensor, accumulate: bool) -> None:
                super()._run(hidden, routing, out, accumulate)
                out[routing.true_tokens() :] = 0

        return Layer(self, problem, experts, placement)
