"""Expert parallelism: ranks share the experts; each runs its own requests with its own engine and cache.

The exchange of a layer is collective, so all ranks take every step together. A step is a turn: ranks agree on the most
tokens of any of them, then each runs its own tokens. A rank without tokens only serves the others' experts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

import ttnn_moe
from ttnn_moe import decoder
from ttnn_moe.backend import Prepared
from ttnn_moe.contract import Placement
from ttnn_moe.kv.cache import KVCache
from ttnn_moe.kv.step import Step
from ttnn_moe.parallel import ExpertParallel
from ttnn_moe.sizes import power_of_2

from ..config import Qwen3MoeConfig
from ..model import Modules, MoE, Qwen3Moe
from ..split import Split


class Turns(Protocol):
    """How ranks agree on a step. ttnn_moe.parallel.turns has it over torch.distributed."""

    number: int
    """Of the turn that this rank took last."""
    most: int
    """The most tokens of any rank in it."""
    timeout: float
    """Seconds that a rank waits for the others."""
    group: Any
    """The process group of the exchange; None: all processes."""

    def take(self, tokens: int, staying: bool = True) -> bool:
        """Every rank takes the turn. Returns whether any rank has tokens, or stays.

        Args:
            tokens: of this rank in this step. staying: this rank may have more later.
        """


class SharedMoE(MoE):
    """Router and E/D experts."""

    def __init__(self, config: Qwen3MoeConfig, backend: str, split: Split, turns: Turns, exchange: str):
        held = config.num_experts // split.D
        super().__init__(config, backend, held, split.rank * held)
        self._placement = Placement.uniform(config.num_experts, split.D, split.rank)
        self._turns, self._exchange, self.turn = turns, exchange, 0

    def prepared(self, T: int) -> Prepared:
        """The layer for turns of T tokens at most, rounded up to a power of two: the same on every rank."""
        experts, bound = self.experts, power_of_2(T)
        if bound not in self._prepared:
            placement, turns = self._placement, self._turns
            one = ttnn_moe.Problem.of(bound, self.K, experts, self.router.weight.dtype)
            problem = replace(one, E=placement.E, D=placement.D)
            self._prepared[bound] = ExpertParallel(
                problem, experts, placement, turns.group, self.backend, self._exchange, timeout=turns.timeout
            )
        return self._prepared[bound]

    def add_experts(self, x: Tensor, ids: Tensor, weights: Tensor, hidden: Tensor, num_tokens: Tensor | None) -> Tensor:
        self.turn = self._turns.number
        layer = self.prepared(self._turns.most)
        if decoder.uses_kernels(x):
            return layer(hidden, ids, weights, out=x, accumulate=True, num_tokens=num_tokens)
        return x + layer(hidden, ids, weights, num_tokens=num_tokens)

    def serve(self) -> None:
        """Run this rank's experts for the others' tokens."""
        weight = self.router.weight
        x = weight.new_empty(0, weight.shape[1])
        ids = torch.empty(0, self.K, dtype=torch.int32, device=x.device)
        self.add_experts(x, ids, ids.float(), x, None)


class ExpertsQwen3(Qwen3Moe):
    """A rank's experts and a copy of all other weights. Call `leave` after the last request."""

    def __init__(self, config: Qwen3MoeConfig, backend: str, split: Split, turns: Turns, exchange: str = "auto"):
        split.local(config)
        super().__init__(config, backend, Modules(moe=partial(SharedMoE, split=split, turns=turns, exchange=exchange)))
        self._turns = turns

    def forward(self, ids: Tensor, cache: KVCache | None = None, step: Step | None = None) -> Tensor:
        """As Qwen3Moe.forward; every other rank calls it, or `idle`, at the same time."""
        self._turns.take(ids.numel())
        logits = super().forward(ids, cache, step)
        self._serve()  # the last layer runs wanted tokens only, and there may be none
        return logits

    @torch.no_grad()
    def idle(self, staying: bool = False) -> bool:
        """A turn without tokens. Returns whether any rank has tokens or stays.

        Args:
            staying: this rank may have tokens later.
        """
        going = self._turns.take(0, staying)
        if self._turns.most:
            self._serve()
        return going

    def leave(self) -> None:
        """Serve the other ranks until all of them leave."""
        while self.idle():
            pass

    def why_not_captured(self) -> str | None:
        return "ranks agree on each step, and the host takes part"

    def _serve(self) -> None:
        """The layers that have not taken part in this turn."""
        for layer in self.layers:
            moe = layer.mlp
            if isinstance(moe, SharedMoE) and moe.turn != self._turns.number:
                moe.serve()
