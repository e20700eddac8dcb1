"""The gate: nothing is timed whose output is not right, in this run, on these inputs.

Right: every checked token within BOUND of fp64 arithmetic on the same weights, no value of POISON left in an output
that was filled with it before, and no NaN or infinity anywhere. On CUDA every token is checked; on the CPU as many as
CPU_FLOPS allow, drawn anew for every routing, the last one always among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .draw import Draw
from .layer import Layer, Weights

# relative error of a token; bf16 leaves room for weights, activations and expert outputs that are rounded to it
BOUND = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}
POISON = 8192.0  # exact in every dtype
CPU_FLOPS = 2e9  # of fp64 arithmetic a weight set: some tenths of a second


@dataclass(frozen=True)
class Inputs:
    """One call's arguments on its device, and what it must return for the checked tokens.

    Attributes:
        hidden [T, H], ids [T, K] int32, weights [T, K] fp32; draw: the routing they hold.
        tokens: [checked] int64, which are checked; want: [checked, H] fp64. Both on the device of hidden.
    """

    hidden: Tensor
    ids: Tensor
    weights: Tensor
    draw: Draw
    tokens: Tensor
    want: Tensor

    @classmethod
    def of(cls, layer: Layer, hidden: Tensor, draw: Draw, expert_weights: Weights, seed: int = 0) -> Inputs:
        """Put a draw beside hidden, choose the tokens to check, and compute them in fp64."""
        tokens = checked_tokens(layer, len(hidden), hidden.is_cuda, seed)
        want = oracle(hidden, draw, expert_weights, tokens)
        ids, weights = draw.ids.to(hidden.device), draw.weights.to(hidden.device)
        return cls(hidden, ids, weights, draw, tokens.to(hidden.device), want)


def checked_tokens(layer: Layer, T: int, on_cuda: bool, seed: int) -> Tensor:
    """Which of T tokens are checked, ascending: [checked] int64 on the CPU."""
    n = T if on_cuda else int(CPU_FLOPS // (6 * layer.K * layer.H * layer.I))
    if n >= T:
        return torch.arange(T)
    generator = torch.Generator().manual_seed(seed)
    others = torch.randperm(T - 1, generator=generator)[: max(n, 8) - 1]
    return torch.cat([others.sort().values, torch.tensor([T - 1])])


def oracle(hidden: Tensor, draw: Draw, weights: Weights, tokens: Tensor) -> Tensor:
    """[tokens, H] in fp64: the sum over k of w * (silu(x Wg) * (x Wu)) Wd, expert by expert."""
    ids, scale = draw.ids[tokens], draw.weights[tokens].double()
    x = hidden[tokens.to(hidden.device)].double()
    want = torch.zeros_like(x)
    for e in ids.unique().tolist():
        if not 0 <= e < len(weights.down):
            continue
        rows, k = (ids == e).nonzero(as_tuple=True)
        there = rows.to(x.device)
        gate, up = (x[there] @ weights.gate_up[e].double().T).chunk(2, dim=-1)
        out = (gate * torch.sigmoid(gate) * up) @ weights.down[e].double().T
        want.index_add_(0, there, out * scale[rows, k].to(x.device)[:, None])
    return want


@dataclass(frozen=True)
class Verdict:
    """error: the largest relative error of a checked token; wrong: what is wrong, None if nothing."""

    error: float
    wrong: str | None


def judge(outputs: Sequence[Tensor], inputs: Sequence[Inputs]) -> Verdict:
    """Of the outputs of one call on every weight set."""
    worst = 0.0
    for out, given in zip(outputs, inputs, strict=True):
        if out.shape != given.hidden.shape or out.dtype != given.hidden.dtype:
            got = f"{tuple(out.shape)} {out.dtype}"
            return Verdict(float("inf"), f"returned {got}, not {tuple(given.hidden.shape)} {given.hidden.dtype}")
        if not bool(out.isfinite().all()):
            return Verdict(float("inf"), "NaN or infinity in the output")
        # fresh memory of the CPU is zeros, which no token with an expert has
        if bool((out == POISON).any()) or bool(((out == 0).all(1) & (given.ids >= 0).any(1)).any()):
            return Verdict(float("inf"), "part of the output was not written")
        errors = (out[given.tokens].double() - given.want).norm(dim=1) / given.want.norm(dim=1).clamp_min(1e-30)
        worst = max(worst, float(errors.nan_to_num(nan=float("inf")).max()))
    bound = BOUND[inputs[0].hidden.dtype]
    return Verdict(worst, None if worst <= bound else f"a token is off by {worst:.2e}, more than {bound:.0e}")


def check_calls(calls: Sequence[Callable[[], Tensor]], inputs: Sequence[Inputs]) -> Verdict:
    """Of eager calls, which allocate their outputs: memory of that size is poisoned and freed before each, so that
    this is what they are given."""
    outputs = []
    for call, given in zip(calls, inputs, strict=True):
        poisoned = [torch.full_like(given.hidden, POISON) for _ in range(2)]
        del poisoned
        outputs.append(call())
    return judge(outputs, inputs)


def check_replay(replay: Callable[[], object], outputs: Sequence[Tensor], inputs: Sequence[Inputs]) -> Verdict:
    """Of a graph: its outputs are poisoned, and a replay must write them."""
    for out in outputs:
        out.fill_(POISON)
    replay()
    return judge(outputs, inputs)
