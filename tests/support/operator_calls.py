"""Every way into the operator, as a function of the tensors of one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import ttnn_moe
from ttnn_moe import Experts, Placement, Problem, Routing

T, E, K, H, I = 5, 4, 2, 32, 32


@dataclass
class Given:
    """The tensors of a call. rows: hidden, or activations."""

    rows: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor
    out: Tensor
    ids: Tensor
    num_tokens: Tensor

    @property
    def routing(self) -> Routing:
        return Routing.from_topk(self.ids, self.weights, E)

    @property
    def bounded(self) -> Routing:
        return Routing.from_topk(self.ids, self.weights, E, num_tokens=self.num_tokens)

    @property
    def experts(self) -> Experts:
        return Experts.dense(self.gate_up, self.down)


def given(rows: tuple[int, int] = (T, H), seed: int = 0) -> Given:
    g = torch.Generator().manual_seed(seed)
    gate_up, down = torch.randn(E, 2 * I, H, generator=g), torch.randn(E, H, I, generator=g)
    ids = torch.randint(0, E, (T, K), generator=g, dtype=torch.int32)
    hidden, out = torch.randn(rows, generator=g), torch.randn(T, H, generator=g)
    return Given(hidden, torch.rand(T, K, generator=g), gate_up, down, out, ids, torch.tensor(3, dtype=torch.int32))


def prepared(x: Given, placement: Placement | None = None, **options: object) -> Tensor:
    layer = ttnn_moe.prepare(Problem.of(T, K, x.experts, torch.float32), x.experts, placement)
    return layer(x.rows, x.ids, x.weights, **options)  # type: ignore[arg-type]


STEP_ROWS = (T * K, I)
CALLS: dict[str, tuple[Callable[[Given], Tensor], tuple[int, int]]] = {
    "moe": (lambda x: ttnn_moe.moe(x.rows, x.routing, x.experts), (T, H)),
    "moe out": (lambda x: ttnn_moe.moe(x.rows, x.routing, x.experts, out=x.out), (T, H)),
    "moe added": (lambda x: ttnn_moe.moe(x.rows, x.routing, x.experts, out=x.out, accumulate=True), (T, H)),
    "moe bounded": (lambda x: ttnn_moe.moe(x.rows, x.bounded, x.experts), (T, H)),
    "moe bounded out": (lambda x: ttnn_moe.moe(x.rows, x.bounded, x.experts, out=x.out), (T, H)),
    "gate": (lambda x: ttnn_moe.gate_projection(x.rows, x.routing, x.experts), (T, H)),
    "up": (lambda x: ttnn_moe.up_projection(x.rows, x.bounded, x.experts), (T, H)),
    "gate_up": (lambda x: ttnn_moe.gate_up(x.rows, x.routing, x.experts), (T, H)),
    "silu_mul": (lambda x: ttnn_moe.silu_mul(x.rows, x.rows), (T, H)),
    "down": (lambda x: ttnn_moe.down_projection(x.rows, x.routing, x.experts), STEP_ROWS),
    "down out": (lambda x: ttnn_moe.down_projection(x.rows, x.bounded, x.experts, out=x.out), STEP_ROWS),
    "down added": (
        lambda x: ttnn_moe.down_projection(x.rows, x.routing, x.experts, out=x.out, accumulate=True),
        STEP_ROWS,
    ),
    "prepared": (prepared, (T, H)),
    "prepared out": (lambda x: prepared(x, out=x.out), (T, H)),
    "prepared added": (lambda x: prepared(x, out=x.out, accumulate=True, num_tokens=x.num_tokens), (T, H)),
    "mesh": (lambda x: prepared(x, Placement.uniform(E, 2)), (T, H)),
    "rank": (
        lambda x: ttnn_moe.prepare(
            Problem.of(T, K, x.experts, torch.float32),
            x.experts.for_device(Placement.uniform(E, 2, 1)),
            Placement.uniform(E, 2, 1),
        )(x.rows, x.ids, x.weights),
        (T, H),
    ),
}

LEAVES = ("rows", "weights", "gate_up", "down")
