"""The gate: nothing is timed whose output is not right, in this run, on these inputs.

Right: every sampled token within BOUND of fp64 arithmetic on the same weights, no value of POISON left in an output
that was filled with it before, and no NaN or infinity anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .draw import Draw
from .layer import Weights

# relative error of a token; bf16 leaves room for weights, activations and expert outputs that are rounded to it
BOUND = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}
POISON = 8192.0  # exact in every dtype
SAMPLED = 8


@dataclass(frozen=True)
class Inputs:
    """One call's arguments on its device, and what it must return for the sampled tokens.

    Attributes:
        hidden [T, H], ids [T, K] int32, weights [T, K] fp32; draw: the routing they hold.
        tokens: which are checked; want: [tokens, H] fp64.
    """

    hidden: Tensor
    ids: Tensor
    weights: Tensor
    draw: Draw
    tokens: list[int]
    want: Tensor

    @classmethod
    def of(cls, hidden: Tensor, draw: Draw, expert_weights: Weights, seed: int = 0) -> Inputs:
        """Put a draw beside hidden, choose the tokens to check (the last one always), and compute them in fp64."""
        T = len(hidden)
        generator = torch.Generator().manual_seed(seed)
        tokens = sorted({T - 1, *torch.randperm(T, generator=generator)[: SAMPLED - 1].tolist()})
        want = oracle(hidden, draw, expert_weights, tokens)
        return cls(hidden, draw.ids.to(hidden.device), draw.weights.to(hidden.device), draw, tokens, want)


def oracle(hidden: Tensor, draw: Draw, weights: Weights, tokens: Sequence[int]) -> Tensor:
    """[tokens, H] in fp64: the sum over k of w * (silu(x Wg) * (x Wu)) Wd, expert by expert."""
    ids, scale = draw.ids[list(tokens)], draw.weights[list(tokens)].double()
    x = hidden[list(tokens)].double()
    want = torch.zeros_like(x)
    for e in ids.unique().tolist():
        if not 0 <= e < len(weights.down):
            continue
        rows, k = (ids == e).nonzero(as_tuple=True)
        rows_there = rows.to(x.device)
        gate, up = (x[rows_there] @ weights.gate_up[e].double().T).chunk(2, dim=-1)
        out = (gate * torch.sigmoid(gate) * up) @ weights.down[e].double().T
        want.index_add_(0, rows_there, out * scale[rows, k].to(x.device)[:, None])
    return want


@dataclass(frozen=True)
class Verdict:
    """error: the largest relative error of a sampled token; wrong: what is wrong, None if nothing."""

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
        if bool((out == POISON).any()):
            return Verdict(float("inf"), "part of the output was not written")
        got_tokens = out[given.tokens].double()
        errors = (got_tokens - given.want).norm(dim=1) / given.want.norm(dim=1).clamp_min(1e-30)
        worst = max(worst, float(errors.max()))
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
