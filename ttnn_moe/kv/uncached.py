"""Attention without a cache."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .step import Step


class Uncached:
    """Causal attention over B whole sequences of S tokens each, packed. Keys and values live for one layer."""

    def __init__(self, B: int, S: int):
        self.B, self.S = B, S
        self._kept: tuple[Tensor, Tensor] | None = None

    def write(self, layer: int, k: Tensor, v: Tensor, step: Step) -> None:
        """See KVCache."""
        self._kept = k, v

    def attend(self, layer: int, q: Tensor, step: Step) -> Tensor:
        """See KVCache."""
        assert self._kept is not None, "write comes first"
        q, k, v = (x.view(self.B, self.S, *x.shape[1:]).transpose(1, 2) for x in (q, *self._kept))
        self._kept = None
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2).reshape(self.B * self.S, *out.shape[1::2])
