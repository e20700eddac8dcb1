"""Every edge of the contract, once: `ttnn-moe selfcheck` and the tests run them on each backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..contract import Experts, Problem, Routing


@dataclass
class Inputs:
    """One call of a layer.

    Attributes:
        hidden: [T, H]. ids, weights: [T, K]. experts: dense.
        num_tokens: the true number of tokens where T is a bound.
        spoiled: tokens that were given NaN or infinity; every other token must fit the oracle.
    """

    hidden: Tensor
    ids: Tensor
    weights: Tensor
    experts: Experts
    num_tokens: int | None = None
    spoiled: list[int] = field(default_factory=list)

    def to(self, device: str) -> Inputs:
        """The same on a device; strides are kept."""
        tensors = {name: tensor.to(device) for name, tensor in self.experts.tensors.items()}
        hidden, ids, weights = (tensor.to(device) for tensor in (self.hidden, self.ids, self.weights))
        return replace(self, hidden=hidden, ids=ids, weights=weights, experts=replace(self.experts, tensors=tensors))

    @property
    def problem(self) -> Problem:
        """What a backend is asked about this call."""
        T, K = self.ids.shape
        return Problem.of(T, K, self.experts, self.hidden.dtype)

    @property
    def counted_ids(self) -> Tensor:
        """[T, K] ids, -1 in the rows past num_tokens: what an oracle is to add up."""
        ids = self.ids.clone()
        if self.num_tokens is not None:
            ids[self.num_tokens :] = -1
        return ids

    def routing(self) -> Routing:
        """The routing of the call."""
        bound = None
        if self.num_tokens is not None:
            bound = torch.tensor(self.num_tokens, dtype=torch.int32, device=self.ids.device)
        return Routing.from_topk(self.ids, self.weights, self.experts.E, num_tokens=bound)


@dataclass(frozen=True)
class Case:
    """Sizes and what is done to ordinary random inputs.

    accumulates: the sum of out as it was and the result keeps both, in any order.
    """

    name: str
    T: int = 37
    E: int = 8
    K: int = 3
    H: int = 128
    I: int = 128
    change: Callable[[Inputs], object] | None = None
    accumulates: bool = True

    def __str__(self) -> str:
        return self.name

    def make(self, dtype: torch.dtype, seed: int = 0, tokens_seed: int | None = None) -> Inputs:
        """Fresh random inputs on the CPU: hidden ~ N(0, 1), weights scaled so that outputs are of order one.

        tokens_seed: of all but the experts; default: they follow from seed too.
        """
        g = torch.Generator().manual_seed(seed)
        gate_up = torch.randn(self.E, 2 * self.I, self.H, generator=g) * self.H**-0.5
        down = torch.randn(self.E, self.H, self.I, generator=g) * self.I**-0.5
        if tokens_seed is not None:
            g.manual_seed(tokens_seed)
        scores = torch.rand(self.T, max(self.E, self.K), generator=g)
        ids = scores.topk(self.K).indices.int() % self.E
        weights = torch.rand(self.T, self.K, generator=g) + 0.05
        weights = weights / weights.sum(-1, keepdim=True)
        hidden = torch.randn(self.T, self.H, generator=g).to(dtype)
        inputs = Inputs(hidden, ids, weights, Experts.dense(gate_up.to(dtype), down.to(dtype)))
        if self.change is not None:
            self.change(inputs)
        return inputs


def _all_on(expert: int) -> Callable[[Inputs], None]:
    def change(x: Inputs) -> None:
        x.ids = torch.full_like(x.ids, -1)
        x.ids[:, 0] = expert

    return change


def _one_idle_with_nan_weights(x: Inputs) -> None:
    """Weights of an expert with no token are never used: NaN in them must not show."""
    x.ids[x.ids == 2] = 3
    for tensor in x.experts.tensors.values():
        tensor[2] = float("nan")


def _twice(x: Inputs) -> None:
    x.ids[5] = torch.tensor([4, 1, 4])
    x.ids[6] = 7


def _cancelling(x: Inputs) -> None:
    """Weights of about 1e8 that cancel in ascending k, and swallow the last weight in any other order.

    They are powers of two: products with them are exact, so fused multiply-adds change nothing.
    """
    for t, weights in ((5, (2.0**27, -(2.0**27), 1.0)), (6, (-(2.0**27), 2.0**27, -0.5))):
        x.ids[t] = 2
        x.weights[t] = torch.tensor(weights)


def _some_absent(x: Inputs) -> None:
    x.ids[::2, 1] = -1
    x.ids[3] = -1
    x.weights[3] = float("nan")  # the weight of "no expert" is never used


def _out_of_range(x: Inputs) -> None:
    x.ids[0, 0], x.ids[1, 1], x.ids[2, 2], x.ids[4, 0] = x.experts.E, 2**31 - 1, -7, -(2**31)


def _int64(x: Inputs) -> None:
    x.ids = x.ids.long()
    x.ids[0, 0], x.ids[1, 0], x.ids[2, 1] = 2**32 + 1, -(2**40), 2**62


def _strided(x: Inputs) -> None:
    T, H = x.hidden.shape
    x.hidden = torch.cat([x.hidden, x.hidden], 1)[:, :H]
    x.ids = x.ids.t().contiguous().t()
    x.weights = torch.stack([x.weights, x.weights], -1)[..., 0]


def _spoil(x: Inputs) -> None:
    """NaN and infinity in two tokens that share experts with many others."""
    x.hidden[3, 1], x.hidden[9, 0] = float("nan"), float("inf")
    x.spoiled = [3, 9]


def _nan_weight(x: Inputs) -> None:
    x.weights[11, 1] = float("nan")
    x.spoiled = [11]


def _zero_and_negative_weights(x: Inputs) -> None:
    x.weights[0] = 0
    x.weights[1] = -x.weights[1]
    x.weights[2, 0] = 1e4


def _skewed(x: Inputs) -> None:
    g = torch.Generator().manual_seed(1)
    p = 1.0 / torch.arange(1, x.experts.E + 1) ** 1.5
    x.ids = torch.stack([torch.multinomial(p, x.ids.shape[1], generator=g) for _ in range(len(x.ids))]).int()


def _bound(x: Inputs) -> None:
    x.num_tokens = 20
    x.ids[20:] = 10**6  # what lies past the true count is not read, or not used
    x.hidden[20:] = float("nan")


def _few(x: Inputs) -> None:
    """What can be odd in a call that is too small to sort."""
    x.ids[0] = torch.tensor([5, -1, 5, x.experts.E])
    x.ids[1, 2] = -1
    x.hidden[2, 3] = float("nan")
    x.spoiled = [2]


def _few_bound(x: Inputs) -> None:
    x.num_tokens = 3
    x.ids[3:] = -(10**6)
    x.hidden[3:] = float("nan")


PLAIN = Case("plain")
ABSENT = Case("absent_ids", change=_some_absent)
BOUNDED = Case("token_bound", T=32, change=_bound)
CASES = [
    PLAIN,
    Case("one_token", T=1),
    Case("no_token", T=0),
    Case("top1", K=1),
    Case("one_expert", E=1, K=1),
    Case("every_expert", E=4, K=4),
    Case("k16", E=32, K=16),
    Case("more_experts_than_pairs", T=3, E=128, K=2),
    Case("tokens_33", T=33),
    Case("tokens_128", T=128),
    Case("tokens_600", T=600, H=64, I=64),
    Case("all_on_first", T=300, change=_all_on(0)),
    Case("all_on_last", T=65, change=_all_on(7)),
    Case("idle_expert_nan_weights", change=_one_idle_with_nan_weights),
    Case("duplicates", change=_twice),
    Case("duplicates_that_cancel", change=_cancelling, accumulates=False),
    Case("same_expert_k_times", E=2, K=5, change=lambda x: x.ids.fill_(1)),
    ABSENT,
    Case("all_absent", change=lambda x: x.ids.fill_(-1)),
    Case("out_of_range_ids", change=_out_of_range),
    Case("int64_ids", change=_int64),
    Case("strided_inputs", change=_strided),
    Case("nan_and_inf_tokens", change=_spoil),
    Case("nan_weight", change=_nan_weight),
    Case("odd_weights", change=_zero_and_negative_weights),
    Case("skewed", T=200, E=32, K=4, change=_skewed),
    BOUNDED,
    Case("few_odd_pairs", T=4, E=64, K=4, change=_few),
    Case("few_with_a_bound", T=5, E=64, K=2, H=72, I=40, change=_few_bound),
    Case("odd_sizes", H=72, I=40),
    Case("tall", H=256, I=64),
    Case("wide", H=64, I=320),
]
