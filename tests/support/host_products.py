"""Grouped products of a call on the host, against fp64: see host_kernels.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from host_kernels import HostKernels
from ttnn_moe import Experts, Problem, Routing
from ttnn_moe.cuda.arch import ARCHES, HOPPER
from ttnn_moe.cuda.moe.family import Call
from ttnn_moe.cuda.moe.sm80 import SM80, WarpTile
from ttnn_moe.cuda.moe.sm90 import SM90, MlpTile
from ttnn_moe.cuda.moe.sort import Sorters
from ttnn_moe.cuda.moe.sorted import Sorted, SortedPlan

Tile = MlpTile | WarpTile


def family_of(tile: Tile) -> Sorted[Any]:
    return SM90 if isinstance(tile, MlpTile) else SM80


def plan_of(problem: Problem, tile: Tile, sorters: Sorters) -> SortedPlan[Any]:
    """A plan with a tile that the family itself might not choose."""
    return SortedPlan(problem, HOPPER if isinstance(tile, MlpTile) else ARCHES[8, 0], tile, sorters)


def worst_row(
    kernels: HostKernels, monkeypatch: pytest.MonkeyPatch, tile: Tile, ids: Tensor, experts: Experts
) -> float:
    """Run both products of a call; the largest relative error of a row; infinite for NaN and where none may write."""
    kernels.use(monkeypatch)
    (T, K), E, H, I = ids.shape, experts.E, experts.H, experts.I
    gate_up, down = (experts.tensors[name] for name in ("gate_up", "down"))
    hidden = torch.randn(T, H).to(gate_up.dtype)
    # with room for what a wrong kernel writes past the last row
    act, out = (torch.full((T * K + 64, width), 1e4, dtype=hidden.dtype) for width in (I, H))
    problem = Problem.of(T, K, experts, hidden.dtype, torch.float32)
    plan = plan_of(problem, tile, Sorters(128))
    words = torch.full((plan.words.count,), -(2**31), dtype=torch.int32)
    call = Call(hidden, Routing.from_topk(ids, torch.ones(T, K), E), experts, torch.empty(T, H), False)
    family_of(tile).launch(plan, call, (act, out, words))
    expert = ids.flatten()[(ids.flatten() >= 0) & (ids.flatten() < E)].sort().values.long()
    n = len(expert)
    if not (kernels.sound and bool((act[n:] == 1e4).all() and (out[n:] == 1e4).all())):
        return float("inf")
    x = hidden[words[:n].long()].double()
    both = torch.einsum("rh,rih->ri", x, gate_up.double()[expert])
    gate, up = (both[:, 0::2], both[:, 1::2]) if experts.gate_up_order == "interleaved" else both.chunk(2, 1)
    errors = []
    for got, want in (
        (act, torch.nn.functional.silu(gate) * up),
        (out, torch.einsum("ri,rhi->rh", act[:n].double(), down.double()[expert])),
    ):
        errors.append((got[:n].double() - want).norm(dim=1) / want.norm(dim=1))
    return float(torch.cat(errors).nan_to_num(nan=float("inf")).max())


def experts_of(E: int, H: int, I: int, dtype: torch.dtype, order: str = "halves") -> Experts:
    gate_up, down = torch.randn(E, 2 * I, H) * H**-0.5, torch.randn(E, H, I) * I**-0.5
    return Experts.dense(gate_up.to(dtype), down.to(dtype), gate_up_order=order)


def some_tokens(T: int, H: int, I: int, dtype: torch.dtype, order: str) -> tuple[Tensor, Experts]:
    """Ids of T tokens, two each, and four experts: one with no token, whose weights are NaN; ids of no expert."""
    torch.manual_seed(T)
    ids = torch.randint(0, 2, (T, 2), dtype=torch.int32)
    ids[::7, 0], ids[T // 2, 1] = 3, -1
    experts = experts_of(4, H, I, dtype, order)
    for tensor in experts.tensors.values():
        tensor[2] = float("nan")
    return ids, experts


def bound_of(dtype: torch.dtype) -> float:
    """Of worst_row: roundings of activations and outputs."""
    return 4e-3 if dtype == torch.bfloat16 else 1e-3
