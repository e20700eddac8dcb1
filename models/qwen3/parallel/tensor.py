"""Tensor parallelism: every rank runs the same requests, with its part of the heads, of I and of the vocabulary.

Each layer sums over ranks twice, after attention and after the experts; the logits are gathered. All ranks get the
same bits, so their engines choose the same tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

import ttnn_moe
from ttnn_moe import decoder
from ttnn_moe.kv.cache import KVCache
from ttnn_moe.kv.pages import default_memory
from ttnn_moe.kv.step import Step

from ..config import Qwen3MoeConfig
from ..layers import Attention, DenseMLP, Linear, Modules, MoE, RMSNorm
from ..model import Qwen3Moe
from ..runtime import graphs
from ..runtime.graphs import Captured, Graphs, Inputs
from ..runtime.sampling import fresh_seed
from ..split import Split


class Sums(Protocol):
    """What the ranks do together; each call is made by all of them, in the same order. See parallel.ranks.sums."""

    def add(self, part: Tensor, x: Tensor) -> Tensor:
        """x plus the sum of every rank's part, with the same bits on every rank; both may be overwritten."""

    def gather(self, part: Tensor) -> Tensor:
        """[R, D * n] of every rank's [R, n], in ascending rank."""

    def least(self, n: int) -> int:
        """The least of every rank's n; before the first step."""

    def check(self) -> None:
        """Raise the error of a rank that waited in vain, if the device knows of one. Waits for nothing."""

    def step(self) -> AbstractContextManager[object]:
        """Around a step: where it fails on this rank, every later one raises."""

    def fail(self, error: BaseException) -> None:
        """A step failed with this error on this rank, within `step` or before."""

    def captures(self) -> AbstractContextManager[object]:
        """Around the capture of a step, which sends nothing. Every rank calls it: all have the step, or all raise."""

    def alone(self) -> AbstractContextManager[object]:
        """Inside, sums and gathers send nothing, and what they return says nothing."""


class TensorAttention(Attention):
    """Some of the heads."""

    def __init__(self, config: Qwen3MoeConfig, layer: int, sums: Sums):
        super().__init__(config, layer)
        self._sums = sums

    def forward(self, x: Tensor, norm: RMSNorm, rope: tuple[Tensor, Tensor], cache: KVCache, step: Step) -> Tensor:
        q = self._write(x, norm, rope, cache, step, self.heads)
        attended = cache.attend(self.layer, q, step).flatten(1)
        x = self._sums.add(decoder.linear(attended, self.out.weight), x)
        return x if self.out.bias is None else x + self.out.bias


class TensorDenseMLP(DenseMLP):
    """Some of the intermediate channels."""

    def __init__(self, config: Qwen3MoeConfig, sums: Sums):
        super().__init__(config)
        self._sums = sums

    def forward(self, x: Tensor, norm: RMSNorm, step: Step) -> Tensor:
        gate, up = norm.into(self.gate_up, x).chunk(2, dim=-1)
        return self._sums.add(decoder.linear(F.silu(gate) * up, self.down.weight), x)


class TensorMoE(MoE):
    """Some of each expert's intermediate channels; every rank routes all tokens."""

    def __init__(self, config: Qwen3MoeConfig, backend: str, sums: Sums):
        super().__init__(config, backend)
        self._sums = sums

    def add_experts(self, x: Tensor, ids: Tensor, weights: Tensor, hidden: Tensor, num_tokens: Tensor | None) -> Tensor:
        if decoder.uses_kernels(x):
            part = self.prepared(x.shape[0])(hidden, ids, weights, num_tokens=num_tokens)
        else:
            routing = ttnn_moe.Routing.from_topk(ids, weights, self.router.out_features, num_tokens=num_tokens)
            part = ttnn_moe.moe(hidden, routing, self.experts, backend=self.backend)
        return self._sums.add(part, x)


class TensorQwen3(Qwen3Moe):
    """A rank's part of the model. Its config has the rank's own numbers of heads and channels."""

    def __init__(self, config: Qwen3MoeConfig, backend: str, split: Split, sums: Sums):
        shared = Modules(
            partial(TensorAttention, sums=sums), partial(TensorDenseMLP, sums=sums), partial(TensorMoE, sums=sums)
        )
        super().__init__(split.local(config), backend, shared)
        self._sums, self._words = sums, config.vocab_size // split.D
        self._first = split.rank * self._words
        self._seeds = random.Random(sums.least(fresh_seed()))
        if self.head is not None:
            self.head = Linear(config.hidden_size, self._words, bias=False).requires_grad_(False)

    def cache_memory(self) -> int:
        """See Qwen3Moe. Every rank calls it: with as many pages on each, their engines admit the same requests."""
        return self._sums.least(default_memory(self.device))

    def fresh_seed(self) -> int:
        """See DrawsSeeds. Every rank calls it: their engines then draw the same tokens."""
        return self._seeds.getrandbits(62)

    def forward(self, ids: Tensor, cache: KVCache | None = None, step: Step | None = None) -> Tensor:
        """As Qwen3Moe.forward; every other rank calls it at the same time."""
        with self._sums.step():
            return super().forward(ids, cache, step)

    def graphs(self) -> SumGraphs:
        """Those of an engine's steps."""
        return SumGraphs(graphs.graphs_for(self.device, self._sums.alone), self._sums)

    def fail(self, error: BaseException) -> None:
        """See SharesSteps."""
        self._sums.fail(error)

    def logits(self, x: Tensor) -> Tensor:
        weight = self.embed.weight[self._first :][: self._words] if self.head is None else self.head.weight
        return self._sums.gather(decoder.norm_linear(x, self.norm.weight, self.norm.eps, weight))

    def check(self, nan: bool) -> None:
        """See SharesSteps."""
        self._sums.check()


class SumGraphs:
    """Graphs of steps that ranks take together: all ranks capture a step, or none has it.

    A capture, and what comes before it, send nothing. See Graphs.
    """

    def __init__(self, device: Graphs, sums: Sums):
        self._device, self._sums = device, sums
        self.ahead, self.counted, self.early = device.ahead, device.counted, device.early

    def begin(self, tokens: int, most: int) -> int | None:
        """See Graphs."""
        return self._device.begin(tokens, most)

    def capture(self, run: Callable[[], Tensor], inputs: Inputs | None = None) -> Captured:
        """See Graphs."""
        with self._sums.captures():
            captured = self._device.capture(run, inputs)
        return captured
