"""The contract on one backend: the fused operator at every edge, the steps, the prepared layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from .. import api
from ..backend import AlignsRows, Backend, Numerics
from ..contract import Problem
from ..formats import mxfp4, mxfp4_boxes
from . import formats
from .bounds import BOUND, POISON, poisoned
from .check import Check
from .edges import ABSENT, BOUNDED, CASES, PLAIN, Case, Inputs
from .oracle import oracle

LIKE_GPT_OSS = ("plain", "one_token", "duplicates", "absent_ids", "skewed", "token_bound", "idle_expert_nan_weights")
QWEN3 = [Case(f"Qwen3-30B-A3B's layer, T={T}", T, E=128, K=8, H=2048, I=768) for T in (1, 128)]


def plain_problem(dtype: torch.dtype, device: str, weight_format: str = formats.DENSE) -> Problem:
    """The smallest problem that every backend runs."""
    return Problem(PLAIN.T, PLAIN.E, PLAIN.K, PLAIN.H, PLAIN.I, dtype, weight_format=weight_format, device=device)


def checks(backend: Backend, device: str, dtype: torch.dtype, weight_format: str = formats.DENSE) -> Iterator[Check]:
    """All checks of the contract, in the order in which to run them; the steps with dense weights alone."""
    # the full layer takes 1.2 GB in bf16, and a CPU minutes
    for case in (*CASES, *(QWEN3 if device != "cpu" else ())):
        yield _fused(case, backend, device, dtype, weight_format)
    if weight_format in (mxfp4.NAME, mxfp4_boxes.NAME):
        for case in CASES:
            if case.name in LIKE_GPT_OSS:
                yield _fused(case, backend, device, dtype, weight_format, like_gpt_oss=True)
    if weight_format == formats.DENSE:
        yield from _steps(backend, device, dtype)
    yield from _outs(backend, device, dtype, weight_format)
    yield from _prepared(backend, device, dtype, weight_format)


def expected(inputs: Inputs, numerics: Numerics, out: Tensor | None = None) -> Tensor:
    """[T, H] fp64: what the backend is to return for these inputs, rounded where it declares, or to add to out."""
    return oracle(inputs.hidden, inputs.counted_ids, inputs.weights, inputs.experts, numerics, out)


def _fused(
    case: Case, backend: Backend, device: str, dtype: torch.dtype, weight_format: str, like_gpt_oss: bool = False
) -> Check:
    name = f"moe, {case.name.replace('_', ' ')}" + ", as gpt-oss" * like_gpt_oss
    case = formats.case_in(weight_format, case)
    there, inputs = _in_format(case.make(dtype), weight_format, device, like_gpt_oss)

    def write(out: Tensor) -> None:
        api.moe(there.hidden, there.routing(), there.experts, out=out, backend=backend.name)

    numerics, refused = backend.numerics(there.problem), backend.why_not(there.problem) or ""
    return _written(name, write, there, inputs, numerics, dtype, refused)


def _written(
    name: str,
    write: Callable[[Tensor], object],
    there: Inputs,
    inputs: Inputs,
    numerics: Numerics,
    dtype: torch.dtype,
    refused: str = "",
) -> Check:
    """A check of what write makes of a poisoned out of this dtype, up to num_tokens."""
    T, H = inputs.hidden.shape
    n = T if inputs.num_tokens is None else inputs.num_tokens

    def run() -> Tensor:
        out = poisoned(T, H, dtype=dtype, device=there.hidden.device)
        write(out)
        if bool((out[n:] != POISON).any()):
            raise AssertionError("rows past num_tokens were written")
        return out[:n]

    return Check(name, run, lambda: expected(inputs, numerics)[:n], BOUND[inputs.hidden.dtype], refused)


def _outs(backend: Backend, device: str, dtype: torch.dtype, weight_format: str) -> Iterator[Check]:
    """The other kinds of out: in fp32, and added to."""
    there, inputs = _in_format(PLAIN.make(dtype), weight_format, device)
    numerics, before = backend.numerics(there.problem), torch.ones(PLAIN.T, PLAIN.H, dtype=dtype)

    def write(out: Tensor, accumulate: bool = False) -> Tensor:
        given = there.hidden, there.routing(), there.experts
        return api.moe(*given, out=out, accumulate=accumulate, backend=backend.name)

    yield _written("moe, fp32 out", write, there, inputs, numerics, torch.float32)
    yield Check(
        "moe, added to out",
        lambda: write(before.to(device, copy=True), accumulate=True),
        lambda: expected(inputs, numerics, before),
        BOUND[dtype],
    )


def _steps(backend: Backend, device: str, dtype: torch.dtype) -> Iterator[Check]:
    name, bound = backend.name, BOUND[dtype]
    inputs = ABSENT.make(dtype)
    there = inputs.to(device)
    align = backend.row_align if isinstance(backend, AlignsRows) else 1
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
    g[0, :4] = torch.tensor([100, -100, 1000, -1000])  # exp of them overflows
    yield Check(
        "silu_mul",
        lambda: api.silu_mul(g.to(device), u.to(device), backend=name),
        lambda: torch.nn.functional.silu(g.float()) * u.float(),
        bound,
    )
    rows = torch.zeros(layout.capacity, inputs.experts.I, dtype=dtype)
    rows[real] = act.to(dtype)
    before = torch.ones(ABSENT.T, ABSENT.H, dtype=dtype)

    def down(out: Tensor | None = None) -> Tensor:
        call, given = api.down_projection, (rows.to(device), there.routing(), there.experts)
        return call(*given, row_align=align, out=out, accumulate=out is not None, backend=name)

    numerics = Numerics(activation=dtype)
    yield Check("down_projection", down, lambda: expected(inputs, numerics), bound)
    yield Check(
        "down_projection, added to out",
        lambda: down(before.to(device, copy=True)),
        lambda: expected(inputs, numerics, before),
        bound,
    )


def _in_format(inputs: Inputs, weight_format: str, device: str, like_gpt_oss: bool = False) -> tuple[Inputs, Inputs]:
    """The inputs on the device, where their weights are quantised, and on the CPU."""
    there = inputs.to(device)
    if weight_format == formats.DENSE:
        return there, inputs
    there.experts = formats.experts_in(weight_format, there.experts)
    if like_gpt_oss:
        there = formats.as_gpt_oss(there)
    return there, there.to("cpu")


def _prepared(backend: Backend, device: str, dtype: torch.dtype, weight_format: str) -> Iterator[Check]:
    """One layer, which has to read the tokens of each call, and their number."""
    there, inputs = _in_format(PLAIN.make(dtype), weight_format, device)
    layer = api.prepare(there.problem, there.experts, backend=backend.name)
    numerics = backend.numerics(there.problem)
    yield Check(
        "prepared layer",
        lambda: layer(there.hidden, there.ids, there.weights),
        lambda: expected(inputs, numerics),
        BOUND[dtype],
    )
    for name, case in (("other tokens", PLAIN), ("fewer tokens and a bound", BOUNDED)):
        mine = replace(case.make(dtype, tokens_seed=1), experts=inputs.experts)
        given = replace(mine.to(device), experts=there.experts)

        def write(out: Tensor, given: Inputs = given) -> None:
            bound = given.routing().num_tokens
            layer(given.hidden, given.ids, given.weights, out=out, num_tokens=bound)

        yield _written(f"prepared layer, {name}", write, given, mine, numerics, dtype)
