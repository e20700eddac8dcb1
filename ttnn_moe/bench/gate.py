"""The gate: nothing is timed unless its output is right, in this run, on these inputs.

Right: every checked token is within BOUND of the fp64 oracle on the same weights. Where one is not, all are within
BOUND of the fp32 oracle with the roundings that the implementation declares, which weigh more in small layers. That
oracle alone judges an implementation that declares operands such as MXFP8. No value of POISON is left in an output that
was filled with it, and no NaN or infinity is anywhere. On CUDA the gate checks every token. On the CPU it checks as
many as CPU_FLOPS allow, drawn anew for every routing, and always the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from ..backend import Numerics
from ..contract import Experts
from ..selfcheck.bounds import BOUND, POISON, token_errors
from ..selfcheck.oracle import oracle
from .draw import Draw
from .layer import Layer, Weights

CPU_FLOPS = 2e9  # of fp64 arithmetic a weight set: some tenths of a second


@dataclass(frozen=True)
class Inputs:
    """One call's arguments on its device, and what it must return for the checked tokens.

    Attributes:
        hidden [T, H], ids [T, K] int32, weights [T, K] fp32; draw: the routing they hold.
        tokens: [checked] int64, which are checked; want: [checked, H] fp64. Both on the device of hidden.
        declared: gives want with declared roundings; None: there are none.
    """

    hidden: Tensor
    ids: Tensor
    weights: Tensor
    draw: Draw
    tokens: Tensor
    want: Tensor
    declared: Callable[[], Tensor] | None = None

    @classmethod
    def of(cls, layer: Layer, hidden: Tensor, draw: Draw, expert_weights: Weights, seed: int = 0) -> Inputs:
        """Put a draw beside hidden, choose the tokens to check, and compute them in fp64."""
        tokens = checked_tokens(layer, len(hidden), hidden.is_cuda, seed)
        at = tokens.to(hidden.device)
        want = oracle(hidden[at], draw.ids[tokens], draw.weights[tokens], expert_weights.experts)
        ids, weights = draw.ids.to(hidden.device), draw.weights.to(hidden.device)
        return cls(hidden, ids, weights, draw, tokens.to(hidden.device), want)


def rounded(inputs: Sequence[Inputs], sets: Sequence[Weights], numerics: Numerics | None) -> Sequence[Inputs]:
    """The inputs with what is right by declared roundings: now, where operands are among them; None: there are none."""
    if numerics is None:
        return inputs
    out = []
    for given, weights in zip(inputs, sets, strict=True):
        want = lru_cache(maxsize=1)(partial(_declared, given, weights.experts, numerics))
        out.append(replace(given, declared=want) if numerics.operands is None else replace(given, want=want()))
    return out


def _declared(given: Inputs, experts: Experts, numerics: Numerics) -> Tensor:
    hidden, ids, scale = (tensor[given.tokens] for tensor in (given.hidden, given.ids, given.weights))
    return oracle(hidden, ids, scale, experts, numerics)


def checked_tokens(layer: Layer, T: int, on_cuda: bool, seed: int) -> Tensor:
    """Which of T tokens are checked, ascending: [checked] int64 on the CPU."""
    n = T if on_cuda else int(CPU_FLOPS // (6 * layer.K * layer.H * layer.I))
    if n >= T:
        return torch.arange(T)
    generator = torch.Generator().manual_seed(seed)
    others = torch.randperm(T - 1, generator=generator)[: max(n, 8) - 1]
    return torch.cat([others.sort().values, torch.tensor([T - 1])])


@dataclass(frozen=True)
class Verdict:
    """error: the largest relative error of a checked token, from the oracle that judged it; wrong: what is wrong, None
    if nothing."""

    error: float
    wrong: str | None


def judge(outputs: Sequence[Tensor], inputs: Sequence[Inputs]) -> Verdict:
    """Of the outputs of one call on every weight set."""
    worst, bound = 0.0, BOUND[inputs[0].hidden.dtype]
    for out, given in zip(outputs, inputs, strict=True):
        if out.shape != given.hidden.shape or out.dtype != given.hidden.dtype:
            got = f"{tuple(out.shape)} {out.dtype}"
            return Verdict(float("inf"), f"returned {got}, not {tuple(given.hidden.shape)} {given.hidden.dtype}")
        if not bool(out.isfinite().all()):
            return Verdict(float("inf"), "NaN or infinity in the output")
        # fresh memory of the CPU is zeros, which no token with an expert has
        if bool((out == POISON).any()) or bool(((out == 0).all(1) & (given.ids >= 0).any(1)).any()):
            return Verdict(float("inf"), "part of the output was not written")
        error = float(token_errors(out[given.tokens], given.want).max())
        if error > bound and given.declared is not None:
            error = float(token_errors(out[given.tokens], given.declared()).max())
        worst = max(worst, error)
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
