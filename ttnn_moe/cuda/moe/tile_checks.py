"""`ttnn-moe selfcheck`: every tile of the families that offer tiles to check, and the times by which to choose one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...accelerator import on
from ...bench.layer import Layer, Weights
from ...contract import Experts, Problem, Routing
from ...selfcheck.bounds import BOUND, poisoned
from ...selfcheck.check import Check
from ...selfcheck.oracle import oracle
from ..arch import Target, target_of
from .cuda_cpp import arch_of
from .families import FAMILIES
from .family import Call, Family, numerics_of
from .sorted import Sorted, Tile

BF16 = torch.bfloat16
E, K = 8, 2
SIZES, TIMED = (256, 192), (2048, 1024)
"""H and I of the checks, and of the times."""
TOKENS = (1, 8, 16, 32, 64, 128, 256, 1024, 4096)
REPEATS = 5


def checks(weight_format: str, families: Iterable[Family[Any]] = FAMILIES) -> Iterator[Check]:
    """One check a tile: four tiles of tokens of E experts, K each, 80% of the pairs on one expert."""
    target = target_of()
    experts = _experts(weight_format, *SIZES)
    for family in _able(families, experts, target):
        for tile in family.checked_tiles():
            T = 2 * E // K * tile.max_n + 3
            yield Check(f"{family.name}, {tile}, T={T}", *_check(family, tile, T, experts, target), BOUND[BF16])


def advice(
    weight_format: str, families: Iterable[Family[Any]] = FAMILIES, tokens: Iterable[int] = TOKENS
) -> Iterator[str]:
    """A line for each number of tokens: the fastest tile, and the one that the family chooses."""
    target = target_of()
    experts = _experts(weight_format, *TIMED)
    for family in _able(families, experts, target):
        for T in tokens:
            hidden, routing = _call(T, experts)
            own = family.tile(Problem.of(T, K, experts, BF16), arch_of(target))
            tiles = dict.fromkeys([own, *family.checked_tiles()])
            times = {tile: _microseconds(launching(family, tile, hidden, routing, experts, target)) for tile in tiles}
            best = min(times, key=times.__getitem__)
            said = f"fastest {best} ({times[best]:,.0f} us), {family.name} chooses {own} ({times[own]:,.0f} us)"
            yield f"T={T}, E={E}, K={K}, H={experts.H}, I={experts.I}: {said}"


def _experts(weight_format: str, H: int, I: int) -> Experts:
    return Weights.random(Layer("", E, K, H, I, weight_format=weight_format), "cuda", 0).experts


def _able(families: Iterable[Family[Any]], experts: Experts, target: Target) -> list[Sorted[Any]]:
    """Those of the format that run here and have tiles to check."""
    problem = Problem.of(1, K, experts, BF16)
    found = [f for f in families if isinstance(f, Sorted) and f.weight_format == experts.format and f.checked_tiles()]
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
    """The median of REPEATS calls, by the device's events; the first compiles."""
    run()
    taken = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) * 1e3)
    return statistics.median(taken)
