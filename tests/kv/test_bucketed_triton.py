"""The Triton form of bucketed attention: in the interpreter here, on a GPU there; and what chooses it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from bucketed_tiers import filled
from processes import run_interpreted, run_pytest
from ttnn_moe.choice import TORCH
from ttnn_moe.cuda import device
from ttnn_moe.cuda.attention import bucketed, bucketed_triton
from ttnn_moe.cuda.device import H200
from ttnn_moe.cuda.jit import build
from ttnn_moe.kv.bucketed.attention import ATTENTION

CASES = "tests/support/bucketed_cases.py"


@pytest.mark.slow(20)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the cases run on the GPU")
def test_cases_in_the_interpreter() -> None:
    run_interpreted(CASES)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cases_on_the_gpu() -> None:
    run_pytest(CASES, "-n", "0")


@pytest.mark.parametrize(
    ("D", "dtype", "on", "runs"),
    [
        (128, torch.bfloat16, "cuda:0", bucketed.NAME),
        (128, torch.float16, "cuda:0", bucketed_triton.NAME),
        (96, torch.bfloat16, "cuda:0", bucketed_triton.NAME),
        (512, torch.bfloat16, "cuda:0", TORCH),
        (128, torch.bfloat16, "cpu", TORCH),
    ],
)
def test_who_runs(D: int, dtype: torch.dtype, on: str, runs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "query", lambda _: H200)
    monkeypatch.setattr(build, "why_not", lambda: None)
    rows, at = filled({2: [5]}, 1, D), torch.zeros(1, dtype=torch.int64)
    q = torch.empty(1, 1, 8, D, dtype=dtype, device="meta")
    assert ATTENTION.explain(torch.device(on), q, rows.tiers, at, None, None, None, False, None, None)[0] == runs
