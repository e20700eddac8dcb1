"""`ttnn-moe selfcheck`: every tile of the families that offer tiles to check, and the times by which to choose one.

A fault of a kernel spoils its process. So each tile is checked and timed in a process of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...accelerator import on
from ...bench.layer import Layer, Weights
from ...contract import Experts, Problem, Routing
from ...selfcheck.apart import call_apart
from ...selfcheck.bounds import BOUND, poisoned
from ...selfcheck.check import Check, Outcome, measure
from ...selfcheck.oracle import oracle
from ..arch import Arch, Target, target_of
from .cuda_cpp import arch_of
from .families import FAMILIES
from .family import Call, Family, numerics_of
from .sorted import Sorted, Tile

BF16 = torch.bfloat16
E, K = 8, 2
SIZES, TIMED = (256, 192), (2048, 1024)
"""H and I of the checks, and of the times."""
TOKENS = (1, 8, 16, 32, 64, 128, 256, 1024, 4096)
REPEATS, WARM_S = 5, 0.05
SECONDS = 300.0
"""A tile has so long: one that hangs fails."""

Times = dict[int, float]
"""Microseconds of a call, by number of tokens; none of a tile that failed."""
Run = Callable[[Sorted[Any], Tile, int], tuple[Outcome, Times]]


def measured(family: Sorted[Any], tile: Tile, device: int, tokens: Iterable[int] = TOKENS) -> tuple[Outcome, Times]:
    """Check a tile on a GPU; if it passes, also time it.

    The check: four tiles of tokens of E experts, K each, 80% of the pairs on one expert.
    """
    torch.cuda.set_device(device)
    target, experts, times = target_of(), _experts(family.weight_format, *SIZES), {}
    check = Check(_name(family, tile), *_check(family, tile, _tokens(tile), experts, target), BOUND[BF16])
    outcome = measure(check, "cuda")
    if outcome.passed:
        experts = _experts(family.weight_format, *TIMED)
        for T in tokens:
            times[T] = _microseconds(launching(family, tile, *_call(T, experts), experts, target))
    return outcome, times


def checks(
    weight_format: str, families: Iterable[Family[Any]] = FAMILIES, run: Run = measured
) -> Iterator[Outcome | str]:
    """What checking each tile gave, and then a line of advice for each number of tokens.

    Args:
        run: checks and times one tile on a GPU, in a process of its own.
    """
    target = target_of()
    device = torch.cuda.current_device() if torch.cuda.is_available() else 0
    for family in _able(weight_format, families, target):
        times: dict[Tile, Times] = {}
        for tile in family.checked_tiles():
            try:
                outcome, times[tile] = call_apart(SECONDS, run, family, tile, device)
            except RuntimeError as failure:
                outcome = Outcome(_name(family, tile), False, None, None, str(failure))
            yield outcome
        yield from _advice(family, times, arch_of(target))


def _advice(family: Sorted[Any], times: Mapping[Tile, Times], arch: Arch) -> Iterator[str]:
    """For each number of tokens the fastest of the tiles that passed, and the one that the family chooses."""
    H, I = TIMED
    for T in sorted({T for of_tile in times.values() for T in of_tile}):
        own = family.tile(_problem(T, H, I, family.weight_format), arch)
        able = {tile: of_tile[T] for tile, of_tile in times.items() if T in of_tile}
        best = min(able, key=able.__getitem__)
        of_own = f"{able[own]:,.0f} us" if own in able else "which failed"
        said = f"fastest {best} ({able[best]:,.0f} us), {family.name} chooses {own} ({of_own})"
        yield f"T={T}, E={E}, K={K}, H={H}, I={I}: {said}"


def _name(family: Sorted[Any], tile: Tile) -> str:
    return f"{family.name}, {tile}, T={_tokens(tile)}"


def _tokens(tile: Tile) -> int:
    return 2 * E // K * tile.max_n + 3


def _problem(T: int, H: int, I: int, weight_format: str) -> Problem:
    return Problem(T, E, K, H, I, BF16, weight_format=weight_format, device="cuda")


def _experts(weight_format: str, H: int, I: int) -> Experts:
    return Weights.random(Layer("", E, K, H, I, weight_format=weight_format), "cuda", 0).experts


def _able(weight_format: str, families: Iterable[Family[Any]], target: Target) -> list[Sorted[Any]]:
    """Those of the format that run here and have tiles to check."""
    problem = _problem(1, *SIZES, weight_format)
    found = [f for f in families if isinstance(f, Sorted) and f.weight_format == weight_format and f.checked_tiles()]
    return [family for family in found if family.why_not(problem, target) is None]


def _check(
    family: Sorted[Any], tile: Tile, T: int, experts: Experts, target: Target
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """What a tile makes, and what is right."""
    hidden, routing = _call(T, experts)
    numerics = numerics_of(family, Problem.of(T, K, experts, BF16))

    def want() -> Tensor:
        return oracle(hidden, routing.topk_ids, routing.topk_weights, experts, numerics).cpu()

    return launching(family, tile, hidden, routing, experts, target), want


def launching(
    family: Sorted[Any], tile: Tile, hidden: Tensor, routing: Routing, experts: Experts, target: Target
) -> Callable[[], Tensor]:
    """A call with one tile, whatever the family would choose: it returns out [T, H], poisoned before."""
    plan = family.plan_of(Problem.of(routing.T, routing.K, experts, hidden.dtype), arch_of(target), tile)
    buffers = tuple(torch.empty(b.shape, dtype=b.dtype, device=hidden.device) for b in family.scratch(plan))

    def run() -> Tensor:
        out = poisoned(*hidden.shape, dtype=hidden.dtype, device=hidden.device)
        with on(hidden.device):
            family.launch(plan, Call(hidden, routing, experts, out, False), buffers)
        return out

    return run


def _call(T: int, experts: Experts) -> tuple[Tensor, Routing]:
    g = torch.Generator("cpu").manual_seed(T)
    drawn: Any = {"generator": g, "dtype": torch.float32, "device": "cpu"}
    ids = torch.rand(T, experts.E, **drawn).topk(K).indices.int()
    ids[torch.rand(T, K, **drawn) < 0.8] = 1
    hidden = torch.randn(T, experts.H, **drawn).bfloat16().to(experts.device)
    weights = torch.rand(T, K, **drawn) + 0.1
    return hidden, Routing.from_topk(ids.to(experts.device), weights.to(experts.device), experts.E)


def _microseconds(run: Callable[[], Tensor]) -> float:
    """The median of REPEATS calls, by the device's events, after WARM_S of calls; the first compiles."""
    run()
    start, taken = time.perf_counter(), []
    while time.perf_counter() - start < WARM_S:
        run()
        torch.cuda.synchronize()
    for _ in range(REPEATS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        last.synchronize()
        taken.append(first.elapsed_time(last) * 1e3)
    return statistics.median(taken)
