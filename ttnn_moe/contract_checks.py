"""The contract's operators, steps and edges as checks that run on any backend: for `ttnn-moe selfcheck`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import api
from .backend import Backend, Numerics
from .contract import Experts, Problem, Routing
from .selfcheck import Check

# of any token, relative, against arithmetic with the declared roundings
BOUND = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}
POISON = 8192.0


@dataclass(frozen=True)
class Sizes:
    """T tokens, E experts, K of them a token, H hidden, I intermediate."""

    T: int = 37
    E: int = 8
    K: int = 3
    H: int = 128
    I: int = 128


QWEN3 = Sizes(E=128, K=8, H=2048, I=768)  # Qwen3-30B-A3B's layer


def checks(backend: Backend, device: str, dtype: torch.dtype) -> Iterator[Check]:
    """The contract on one backend: the fused operator and its edges, the steps, the prepared layer."""
    name, bound = backend.name, BOUND[dtype]
    for what, sizes, change in _edges():
        yield _fused(f"moe, {what}", sizes, change, backend, device, dtype)
    yield from _steps(name, device, dtype, bound)
    yield _prepared(backend, device, dtype)
    # the full layer takes 1.2 GB in bf16: not where it would take a CPU minutes
    if device != "cpu":
        for T in (1, 128):
            sizes = Sizes(T, QWEN3.E, QWEN3.K, QWEN3.H, QWEN3.I)
            yield _fused(f"moe, Qwen3-30B-A3B's layer, T={T}", sizes, None, backend, device, dtype)


Change = Callable[[Tensor, Tensor, Tensor], None]


def _edges() -> Sequence[tuple[str, Sizes, Change | None]]:
    """(what, sizes, change of hidden, ids, weights)."""

    def absent(hidden: Tensor, ids: Tensor, weights: Tensor) -> None:
        ids[::2, 1], ids[3] = -1, -1
        weights[3] = float("nan")

    def twice(hidden: Tensor, ids: Tensor, weights: Tensor) -> None:
        ids[5] = torch.tensor([4, 1, 4])

    def outside(hidden: Tensor, ids: Tensor, weights: Tensor) -> None:
        ids[0, 0], ids[1, 1] = 8, -(2**31)

    def all_last(hidden: Tensor, ids: Tensor, weights: Tensor) -> None:
        ids.fill_(7)

    def none(hidden: Tensor, ids: Tensor, weights: Tensor) -> None:
        ids.fill_(-1)

    def spoilt(hidden: Tensor, ids: Tensor, weights: Tensor) -> None:
        hidden[3, 1], hidden[9, 0] = float("nan"), float("inf")

    return (
        ("plain", Sizes(), None),
        ("one token", Sizes(T=1), None),
        ("no token", Sizes(T=0), None),
        ("one expert", Sizes(E=1, K=1), None),
        ("every token on the last expert", Sizes(T=65, K=1), all_last),
        ("ids of -1", Sizes(), absent),
        ("no expert at all", Sizes(), none),
        ("one expert named twice", Sizes(), twice),
        ("ids out of range", Sizes(), outside),
        ("NaN and infinity stay in their tokens", Sizes(), spoilt),
        ("odd sizes", Sizes(H=72, I=40), None),
        ("600 tokens", Sizes(T=600, H=64, I=64), None),
    )


@dataclass(frozen=True)
class Inputs:
    """A call of one layer, and its experts."""

    hidden: Tensor
    ids: Tensor
    weights: Tensor
    experts: Experts

    @classmethod
    def of(cls, sizes: Sizes, dtype: torch.dtype, change: Change | None = None, rank: int = 0) -> Inputs:
        """Random ones: the same experts for every rank, and tokens of its own."""
        g = torch.Generator().manual_seed(0)
        T, E, K, H, I = sizes.T, sizes.E, sizes.K, sizes.H, sizes.I
        gate_up = (torch.randn(E, 2 * I, H, generator=g) * H**-0.5).to(dtype)
        down = (torch.randn(E, H, I, generator=g) * I**-0.5).to(dtype)
        g.manual_seed(1 + rank)
        ids = torch.rand(T, E, generator=g).topk(K).indices.int()
        weights = torch.softmax(torch.randn(T, K, generator=g), -1)
        hidden = torch.randn(T, H, generator=g).to(dtype)
        if change is not None:
            change(hidden, ids, weights)
        return cls(hidden, ids, weights, Experts.dense(gate_up, down))

    def on(self, device: str) -> Inputs:
        hidden, ids, weights = (t.to(device) for t in (self.hidden, self.ids, self.weights))
        held = {name: tensor.to(device) for name, tensor in self.experts.tensors.items()}
        return Inputs(hidden, ids, weights, Experts.dense(held["gate_up"], held["down"]))

    def routing(self) -> Routing:
        return Routing.from_topk(self.ids, self.weights, self.experts.E)


def expected(inputs: Inputs, numerics: Numerics) -> Tensor:
    """[T, H] fp32: the contract's formula, a pair at a time, rounded where numerics says."""

    def rounded(x: Tensor, dtype: torch.dtype | None) -> Tensor:
        return x if dtype is None else x.to(dtype).float()

    total = torch.zeros(inputs.hidden.shape, dtype=torch.float32)
    for e in range(inputs.experts.E):
        t, k = (inputs.ids == e).nonzero(as_tuple=True)
        if not len(t):
            continue
        gate_up, down = (w.float() for w in inputs.experts.dequantize(e))
        gate, up = rounded(inputs.hidden[t].float() @ gate_up.t(), numerics.gate_up).chunk(2, -1)
        gate = rounded(gate * torch.sigmoid(gate), numerics.silu)
        y = rounded(rounded(gate * up, numerics.activation) @ down.t(), numerics.expert_out)
        total.index_add_(0, t, rounded(inputs.weights[t, k, None] * y, numerics.weighted))
    return total


def _fused(what: str, sizes: Sizes, change: Change | None, backend: Backend, device: str, dtype: torch.dtype) -> Check:
    inputs = Inputs.of(sizes, dtype, change)
    there, numerics = inputs.on(device), backend.numerics(problem_of(sizes, dtype, device))

    def run() -> Tensor:
        out = torch.full(there.hidden.shape, POISON, dtype=dtype, device=device)
        return api.moe(there.hidden, there.routing(), there.experts, out=out, backend=backend.name)

    return Check(what, run, lambda: expected(inputs, numerics), BOUND[dtype])


def _steps(name: str, device: str, dtype: torch.dtype, bound: float) -> Iterator[Check]:
    inputs = Inputs.of(Sizes(), dtype)
    there = inputs.on(device)
    align = 32 if name == "tenstorrent" else 1
    layout = inputs.routing().step_layout(align)
    real = layout.row_tokens >= 0
    x = inputs.hidden[layout.row_tokens[real].long()].float()
    start = layout.row_start.tolist()
    of_row = [e for e in range(inputs.experts.E) for _ in range(start[e], start[e + 1])]
    weights = inputs.experts.tensors["gate_up"].float()[torch.tensor(of_row)[real[: len(of_row)]]]
    gate, up = torch.einsum("rh,rnh->rn", x, weights).chunk(2, -1)
    act = torch.nn.functional.silu(gate) * up
    for step, want in (("gate_projection", gate), ("up_projection", up), ("gate_up", act)):

        def run(step: str = step) -> Tensor:
            call = getattr(api, step)
            return call(there.hidden, there.routing(), there.experts, row_align=align, backend=name)[real.to(device)]

        yield Check(step, run, lambda want=want: want, bound)  # type: ignore[misc]
    g, u = gate.to(dtype), up.to(dtype)
    yield Check(
        "silu_mul",
        lambda: api.silu_mul(g.to(device), u.to(device), backend=name),
        lambda: torch.nn.functional.silu(g.float()) * u.float(),
        bound,
    )
    rows = torch.zeros(layout.capacity, inputs.experts.I, dtype=dtype)
    rows[real] = act.to(dtype)
    yield Check(
        "down_projection",
        lambda: api.down_projection(rows.to(device), there.routing(), there.experts, row_align=align, backend=name),
        lambda: expected(inputs, Numerics(activation=dtype)),
        bound,
    )


def _prepared(backend: Backend, device: str, dtype: torch.dtype) -> Check:
    sizes = Sizes()
    inputs = Inputs.of(sizes, dtype)
    there = inputs.on(device)
    problem = problem_of(sizes, dtype, device)
    layer = api.prepare(problem, there.experts, backend=backend.name)
    return Check(
        "prepared layer",
        lambda: layer(there.hidden, there.ids, there.weights),
        lambda: expected(inputs, backend.numerics(problem)),
        BOUND[dtype],
    )


def problem_of(sizes: Sizes, dtype: torch.dtype, device: str) -> Problem:
    """The problem of a layer of dense experts."""
    return Problem(sizes.T, sizes.E, sizes.K, sizes.H, sizes.I, dtype, device=device)
