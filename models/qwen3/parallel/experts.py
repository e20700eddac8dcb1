"""Expert parallelism: ranks share the experts; each runs its own requests with its own engine and cache.

The exchange of a layer is collective, so all ranks take every step together. A step is a turn: ranks agree on the most
tokens of any of them, then each runs its own tokens. A rank without tokens only serves the others' experts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
from ttnn_moe.parallel.exchanges import agreement
from ttnn_moe.parallel.exchanges.peer_memory import PeerMemoryExchange
from ttnn_moe.sizes import power_of_2

from ..config import Qwen3MoeConfig
from ..layers import Modules, MoE
from ..model import Qwen3Moe
from ..runtime.graphs import Captured, CudaGraphs, Inputs
from ..split import Split

BY_KERNELS = "hierarchical"
"""The exchange that kernels make on GPUs of one host."""
REMEDY = "read this rank's reason: it may lack memory, or a disk for compiled kernels"


class Turns(Protocol):
    """How ranks agree on a step. ttnn_moe.parallel.ranks.turns has it over torch.distributed."""

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

    def check(self) -> None:
        """Raise what a rank reported. It may take a while: for when something is wrong."""


class SharedMoE(MoE):
    """Router and E/D experts."""

    def __init__(self, config: Qwen3MoeConfig, backend: str, split: Split, turns: Turns, exchange: str):
        held = config.num_experts // split.D
        super().__init__(config, backend, held, split.rank * held)
        self._placement = Placement.uniform(config.num_experts, split.D, split.rank)
        self._turns, self._exchange, self.turn = turns, exchange, 0

    def prepared(self, T: int) -> ExpertParallel:
        """The layer for turns of T tokens at most, rounded up to a power of two: the same on every rank."""
        experts, bound = self.experts, power_of_2(T)
        if bound not in self._prepared:
            placement, turns = self._placement, self._turns
            one = ttnn_moe.Problem.of(bound, self.K, experts, self.router.weight.dtype)
            problem = replace(one, E=placement.E, D=placement.D)
            # kernels of the exchange move results in the dtype of hidden
            wire = problem.dtype if self._exchange == BY_KERNELS and self.router.weight.is_cuda else torch.float32
            self._prepared[bound] = ExpertParallel(
                problem, experts, placement, turns.group, self.backend, self._exchange, wire, timeout=turns.timeout
            )
        layer = self._prepared[bound]
        assert isinstance(layer, ExpertParallel)
        return layer

    def _with_other_kernels(self, prepared: dict[int, Prepared]) -> dict[int, Prepared]:
        # the other ranks keep their layers, and to make one they all meet: this rank keeps its own, also if one fails
        self._prepared = prepared
        for layer in prepared.values():
            assert isinstance(layer, ExpertParallel)
            layer.renew(self.experts)
        return prepared

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
    """A rank's experts and a copy of all other weights. Call `leave` after the last request.

    Attributes:
        began: the turn of the next forward pass is taken.
        owed: a turn was taken, and this rank's experts have not run in all of its layers.
    """

    def __init__(self, config: Qwen3MoeConfig, backend: str, split: Split, turns: Turns, exchange: str = "auto"):
        split.local(config)
        super().__init__(config, backend, Modules(moe=partial(SharedMoE, split=split, turns=turns, exchange=exchange)))
        self.turns, self._exchange = turns, exchange
        self.began = self.owed = False
        self._kernels: dict[int, PeerMemoryExchange] = {}
        self._sizes = set[int]()

    def take(self, tokens: int, staying: bool = True) -> bool:
        """Turns.take, and then all layers of a size that is new.

        Making a layer is collective. Once a kernel of a turn waits for another rank, this rank's host may wait for the
        kernel. A rank that still made layers would then wait for this host, and never send.

        Where an earlier step failed on this rank behind its turn, the others still wait for its experts: these run
        first.
        """
        if self.owed:
            self._serve()
        going = self.turns.take(tokens, staying)
        size = power_of_2(self.turns.most)
        if self.turns.most and size not in self._sizes:
            layers = [moe.prepared(size) for moe in self.shared()]
            with agreement.all_or_none(self.turns.group, "a rank cannot compile its experts", REMEDY):
                for layer in layers:
                    # several at a time; a call would compile one after the other, while all ranks wait
                    layer.compile()
            self._sizes.add(size)
        self.owed = self.turns.most > 0
        return going

    def forward(self, ids: Tensor, cache: KVCache | None = None, step: Step | None = None) -> Tensor:
        """As Qwen3Moe.forward; every other rank calls it, or `idle`, at the same time."""
        if not self.began:
            self.take(ids.numel())
        self.began = False
        logits = super().forward(ids, cache, step)
        self._serve()  # the last layer runs wanted tokens only, and there may be none
        return logits

    @torch.no_grad()
    def idle(self, staying: bool = False) -> bool:
        """A turn without tokens. Returns whether any rank has tokens or stays.

        Args:
            staying: this rank may have tokens later.
        """
        self.check(nan=False)
        going = self.take(0, staying)
        if self.turns.most:
            self._serve()
        return going

    @torch.no_grad()
    def miss(self) -> None:
        """This rank's own tokens leave the turn that was taken, with nothing sent: serve the other ranks'."""
        self.began = False
        for moe in self.shared():
            moe.turn = self.turns.number - 1
        self._serve()

    def leave(self) -> None:
        """Serve the other ranks until all of them leave."""
        while self.idle():
            pass
        if self._kernels:
            torch.cuda.synchronize(self.device)
            self.check(nan=False)

    def why_not_captured(self) -> str | None:
        if self._exchange == BY_KERNELS and self.device.type == "cuda":
            return super().why_not_captured()
        return "ranks agree on each layer's messages, and the host takes part"

    def graphs(self) -> TurnGraphs:
        """Those of an engine's steps."""
        return TurnGraphs(self)

    def check(self, nan: bool) -> None:
        """See SharesSteps. PeerStopped: a kernel says so. RankStopped: a rank reported that its experts failed.

        Such a rank reports before it sends NaN for its sums.
        """
        for kernels in self._kernels.values():
            kernels.check()
        if nan:
            self.turns.check()

    def fail(self, error: BaseException) -> None:
        """See SharesSteps: `owed` says what the others wait for."""

    def shared(self) -> list[SharedMoE]:
        """The layers with experts."""
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, SharedMoE)]

    def _serve(self) -> None:
        """The layers that have not taken part in this turn; then the kernels' errors are on their way."""
        shared = self.shared()
        for moe in shared:
            if moe.turn != self.turns.number:
                moe.serve()
        self.owed = False
        for moe in shared[:1]:  # layers of one size share their kernels
            kernels = moe.prepared(self.turns.most).kernels
            if kernels is not None:
                self._kernels[power_of_2(self.turns.most)] = kernels
                kernels.look()


class TurnGraphs(CudaGraphs):
    """CUDA graphs of steps that ranks take together: one for each power of two of the busiest rank's tokens.

    In decode steps, ranks with fewer tokens pad to as many. The host takes the turn before it replays a graph. A
    capture, and what comes before it, send nothing.
    """

    early = False

    def __init__(self, model: ExpertsQwen3):
        super().__init__(partial(_alone, model))
        self._model = model

    def begin(self, tokens: int, most: int) -> int | None:
        """See Graphs."""
        model = self._model
        model.take(tokens)
        bound = power_of_2(model.turns.most)
        model.began = bound > most
        return None if model.began else bound

    def capture(self, run: Callable[[], Tensor], inputs: Inputs | None = None) -> Captured:
        """See Graphs."""

        def began() -> Tensor:
            self._model.began = True
            return run()

        try:
            captured = super().capture(began, inputs)
        except BaseException:
            self._model.miss()
            raise
        self._model.owed = True  # until it is replayed
        return captured

    def replay_of(self, graph: Any, inputs: Inputs | None) -> Callable[[], None]:
        """See DeviceGraphs."""
        model, replay = self._model, super().replay_of(graph, inputs)

        def run() -> None:
            replay()
            model.owed = False

        return run


def _alone(model: ExpertsQwen3) -> AbstractContextManager[object]:
    """Inside, the layers of this turn send nothing."""
    layers = model.shared()  # `take` made those of this size
    kernels = layers[0].prepared(model.turns.most).kernels if layers else None
    return nullcontext() if kernels is None else kernels.alone()
