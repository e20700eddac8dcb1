"""Hopper's linear layers of a decode step on the host; see test_sm90_host.py. On a GPU: qwen3_kernel_cases."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cuda_gpus import gpu_of, pretend
from host_kernels import GXX, HostKernels, with_mistake
from qwen3_kernel_cases import error
from ttnn_moe import decoder
from ttnn_moe.cuda.jit import pool
from ttnn_moe.cuda.jit.spec import Spec
from ttnn_moe.cuda.linear import decode_linear
from ttnn_moe.cuda.linear.decode_linear import Plan

lateness = pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
emulated = pytest.mark.skipif(GXX is None, reason="g++ is not installed")
BF16, F16 = torch.bfloat16, torch.float16
POISON = 7.0


def _worst(
    host: HostKernels,
    monkeypatch: pytest.MonkeyPatch,
    T: int,
    N: int,
    K: int,
    of: Plan,
    kind: str,
    dtype: torch.dtype = BF16,
) -> float:
    """Largest relative error of a row, infinite for what nobody may do. NaN lies behind x.

    Of a norm, the last row is so small that eps changes it; the first of more than one is zero.
    """
    host.use(monkeypatch)
    decode_linear._launch.cache_clear()
    torch.manual_seed(T)
    x = torch.full((of.rows + 8, K), float("nan")).to(dtype)
    x[:T] = 3 * torch.randn(T, K)
    if kind == "norm":
        x[T - 1] *= 3e-4
        x[: min(T - 1, 1)] = 0
    weight, norm = (torch.randn(N, K) * K**-0.5).to(dtype), torch.randn(K).to(dtype)
    room = torch.full((of.rows + 8, N), POISON).to(dtype)
    room[:T] = torch.randn(T, N)
    wide = x[:T].double(), weight.double()
    with decoder.plain():
        if kind == "norm":
            want = decoder.norm_linear(wide[0], norm.double(), 1e-6, wide[1])
            got = decode_linear.launch(x[:T], weight, norm=norm, eps=1e-6, of=of)
        elif kind == "add":
            want = decoder.linear_add(*wide, None, room[:T].double())
            got = decode_linear.launch(x[:T], weight, residual=room[:T], of=of)
        else:
            want, got = wide[0] @ wide[1].T, decode_linear.launch(x[:T], weight, of=of)
    if not host.sound or not bool((room[T:] == POISON).all()):
        return float("inf")
    return error(got, want)


@emulated
@lateness
@pytest.mark.parametrize(
    ("T", "N", "K", "of", "kind", "dtype"),
    [
        (9, 128, 256, Plan(16, 2, 4), "add", BF16),
        (8, 64, 1536, Plan(8, 4, 3), "norm", F16),
        (33, 128, 1024, Plan(40, 2, 3), "norm", BF16),
        (25, 64, 1024, Plan(32, 8, 2), "norm", BF16),
        (1, 192, 384, Plan(8, 2, 2), "norm", BF16),
        (64, 192, 384, Plan(64, 2, 2), "add", F16),
        (90, 64, 1024, Plan(96, 8, 3), "", BF16),
        (70, 64, 1024, Plan(80, 2, 3), "", F16),
        (130, 128, 1024, Plan(144, 4, 3), "add", BF16),
    ],
    ids=str,
)
def test_sums(
    T: int,
    N: int,
    K: int,
    of: Plan,
    kind: str,
    dtype: torch.dtype,
    late: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rings that turn, and rings that hold all; rooms that are full, and rooms that are not."""
    bound = 1.2e-2 if dtype == BF16 else 2e-3
    assert _worst(HostKernels(tmp_path, late), monkeypatch, T, N, K, of, kind, dtype) < bound


OF_THE_NORM = [
    ("barrier_wait(shared.rows_full + 8 * step, 0);", "", True),
    ("barrier_wait(shared.rows_full + 8 * next.at, next.parity);", "", True),
    ("barrier_wait(shared.full + 8 * next.at, next.parity);", "", True),
    ("barrier_wait(shared.empty + 8 * free.at, free.parity);", "", False),
    ("barrier_wait(shared.parts_full, 0);", "", False),
    ("products_wait<0>();", "", True),
    ("first_k = rank * steps * K_BLOCK", "first_k = 0", False),
    ("shared.sums(thread * OWN, 0)", "shared.sums(0, 0)", False),
    ("from == rank ? shared.sums(rank * OWN, 0)", "from == rank ? shared.sums(0, 0)", False),
    ("shared.part(rank), thread", "shared.part(0), thread", False),
    ("shared.squares_of(rank), thread", "shared.squares_of(0), thread", False),
    ("^ (own % 8)", "", False),
    ("(next.at), shared.norms + step * 128", "(next.at), shared.norms", False),
    ("squared / K", "squared", False),
]
OF_THE_SUM = [
    ("barrier_wait(shared.full + 8 * next.at, next.parity);", "", True),
    ("products_wait<1>();", "", True),
    ("if (t < T) {", "if (t < ROWS) {", False),
    ("tile + rank * OWN + item % FOURS * 4", "tile + item % FOURS * 4", False),
]


@emulated
@pytest.mark.parametrize(
    ("kind", "line", "instead", "late"),
    [("norm", *mistake) for mistake in OF_THE_NORM] + [("add", *mistake) for mistake in OF_THE_SUM],
)
def test_a_mistake_is_seen(
    kind: str, line: str, instead: str, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = HostKernels(tmp_path, late, with_mistake(tmp_path, "sm90/decode_linear", line, instead))
    assert _worst(host, monkeypatch, 13, 128, 1024, Plan(16, 4, 2), kind) > 0.05


@given(
    T=st.integers(1, decode_linear.MAX_ROWS),
    tiles=st.integers(1, 200),
    steps=st.integers(1, 256),
    multiprocessors=st.sampled_from([66, 78, 114, 132, 144]),
)
def test_plans_fit(T: int, tiles: int, steps: int, multiprocessors: int) -> None:
    N, K = 64 * tiles, 128 * steps
    of = decode_linear.plan(T, N, K, multiprocessors)
    if of is None:
        assert 2 * tiles > 3 * multiprocessors
        return
    assert T <= of.rows < T + 16 and K % (64 * of.splits) == 0 and of.splits in (2, 4, 8)
    assert tiles * of.splits <= 3 * multiprocessors
    assert of.shared_memory(K, T <= decode_linear.MAX_NORMED) <= 227 << 10
    # the kernel asserts so
    assert of.stages * 128 * (64 + of.rows) >= (2 if of.rows > 64 else 1) * 256 * (of.rows + 4)


@pytest.mark.parametrize("T", [1, 8, 9, 32, 64, 96, 160])
@pytest.mark.parametrize(("N", "K"), [(5120, 2048), (2048, 4096), (2560, 2048), (2048, 2048), (9216, 4096)])
def test_projections_of_qwen3_have_plans(T: int, N: int, K: int) -> None:
    """Qwen3-30B-A3B's, whole and of two ranks; qkv of Qwen3-235B-A22B."""
    assert decode_linear.plan(T, N, K, 132) is not None


@pytest.mark.parametrize(("N", "K"), [(151936, 2048), (5120, 192)])
def test_no_plan(N: int, K: int) -> None:
    assert decode_linear.plan(8, N, K, 132) is None


@pytest.mark.parametrize("norm", [False, True])
def test_kernels_of_all_rows_are_compiled_ahead(norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Spec] = []
    pretend(monkeypatch, gpu_of((9, 0), multiprocessors=132))
    monkeypatch.setattr(decode_linear, "why_not", lambda *_: None)
    monkeypatch.setattr(pool, "missing", lambda specs, store: list(specs))
    monkeypatch.setattr(pool, "compile_all", lambda specs, store: compiled.extend(specs))
    decode_linear.compile_ahead(torch.empty(5120, 2048, dtype=BF16, device="meta"), norm=norm)
    found = [{name: int(value) for name, value in spec.defines} for spec in compiled]
    assert sorted(of["ROWS"] for of in found) == [8, *range(16, 161, 16)]
    assert all(of["NORM"] == (norm and of["ROWS"] <= 64) for of in found)
