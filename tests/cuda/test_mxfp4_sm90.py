"""Hopper's MXFP4 products without a GPU: plans, the order of channels, every byte and scale, and the kernels on the host.

See test_sm90_host.py. On a GPU tests/cuda/test_mxfp4_gpu.py asks the same family.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from host_kernels import GXX, HostKernels
from mxfp4_cases import GPT_OSS, Form, random_mxfp4, spoil
from ttnn_moe import Experts, Problem, Routing
from ttnn_moe.backend import Numerics
from ttnn_moe.cuda.arch import HOPPER
from ttnn_moe.cuda.moe.family import Call
from ttnn_moe.cuda.moe.sm90_mxfp4 import MXFP4_SM90, Mxfp4Tile, fitted
from ttnn_moe.cuda.moe.sort import Sorters
from ttnn_moe.cuda.moe.sorted import SortedPlan
from ttnn_moe.selfcheck.oracle import oracle

BF16 = torch.bfloat16
on_host = pytest.mark.skipif(GXX is None, reason="g++ is not installed")


def _worst_row(
    host: HostKernels, monkeypatch: pytest.MonkeyPatch, tile: Mxfp4Tile, ids: Tensor, experts: Experts
) -> float:
    """The largest relative error of a token; infinite for what nobody may do, NaN and what nobody may write."""
    host.use(monkeypatch)
    T, K = ids.shape
    hidden, weights = torch.randn(T, experts.H).to(BF16), torch.rand(T, K) + 0.1
    problem = Problem.of(T, K, experts, BF16, torch.float32)
    plan = SortedPlan(problem, HOPPER, fitted(tile, problem, HOPPER), Sorters(128))
    buffers = tuple(
        torch.full((buffer.shape[0] + 64, *buffer.shape[1:]), -(2**31) if buffer.dtype == torch.int32 else 1e4)
        .to(buffer.dtype)
        .contiguous()
        for buffer in MXFP4_SM90.scratch(plan)
    )
    out = torch.full((T, experts.H), 1e4)
    routing = Routing.from_topk(ids, weights, experts.E)
    MXFP4_SM90.launch(plan, Call(hidden, routing, experts, out, False), buffers)
    pairs = int(((ids >= 0) & (ids < experts.E)).sum())
    if not host.sound or not all(bool((buffers[i][pairs:] == 1e4).all()) for i in (0, 1)):
        return float("inf")
    want = oracle(hidden, ids, weights, experts, Numerics(activation=BF16, expert_out=BF16))
    there = want.norm(dim=1) > 0
    errors = (out.double() - want).norm(dim=1)[there] / want.norm(dim=1)[there]
    return float(errors.nan_to_num(nan=float("inf")).max())


def _some_tokens(T: int, H: int, I: int, form: Form) -> tuple[Tensor, Experts]:
    """Ids of T tokens, two each, and four experts: one with no token, whose scales are NaN; ids of no expert."""
    torch.manual_seed(T)
    ids = torch.randint(0, 2, (T, 2), dtype=torch.int32)
    ids[::7, 0], ids[T // 2, 1] = 3, -1
    experts = random_mxfp4(4, H, I, form, "cpu")
    spoil(experts, 2)
    return ids, experts


NARROW, WIDE = Mxfp4Tile(32, 128, 2, 2, 3), Mxfp4Tile(64, 256, 2, 2, 2)


@on_host
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize(
    ("tile", "form", "H", "I", "T", "together"),
    [
        (NARROW, Form(), 64, 32, 1, 1),
        (NARROW, GPT_OSS, 320, 96, 47, 4),
        (WIDE, Form(order="interleaved"), 160, 288, 70, 2),
        (replace(WIDE, groups=4), Form(bias=torch.float32), 288, 64, 33, 2),
    ],
    ids=str,
)
def test_products(
    tile: Mxfp4Tile,
    form: Form,
    H: int,
    I: int,
    T: int,
    together: int,
    late: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Units that are full and cut, tiles of one row, ragged and full; both orders; biases."""
    host = HostKernels(tmp_path, late, together=together)
    assert _worst_row(host, monkeypatch, tile, *_some_tokens(T, H, I, form)) < 8e-3
