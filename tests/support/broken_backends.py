"""Backends that are wrong, for what must notice it."""

from __future__ import annotations

from torch import Tensor

from ttnn_moe.reference import ReferenceBackend


class Forgetful(ReferenceBackend):
    """Leaves the last token out of its result."""

    name = "forgetful"

    def moe(self, hidden, routing, experts, out: Tensor, accumulate: bool) -> None:
        super().moe(hidden, routing, experts, out, accumulate)
        out[-1:] = 0
