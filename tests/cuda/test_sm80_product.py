"""sm80/grouped_gemm.cu without a GPU: its source on the host, with fibers for threads and the PTX ISA's fragments.

Launched by the same host code as on a GPU. NaN in what was not written, copies that land as early or as late as they
may, and a source with one line changed show that a mistake does not pass.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from host_kernels import GXX, HostKernels, with_mistake
from host_products import bound_of, experts_of, plan_of, some_tokens, worst_row
from ttnn_moe import Problem, Routing
from ttnn_moe.cuda.moe.family import Call
from ttnn_moe.cuda.moe.sm80 import SM80, GemmTile
from ttnn_moe.cuda.moe.sort import Sorters

NAME = "sm80/grouped_gemm"
pytestmark = pytest.mark.skipif(GXX is None, reason="g++ is not installed")


BF16, F16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize(
    ("gemm", "dtype", "order", "H", "I", "T"),
    [
        (GemmTile(32, 4), BF16, "halves", 64, 64, 1),
        (GemmTile(32, 4), BF16, "interleaved", 320, 64, 47),
        (GemmTile(64, 3), F16, "halves", 128, 192, 70),
        (GemmTile(64, 4), BF16, "interleaved", 64, 320, 33),
        (GemmTile(128, 4), F16, "halves", 384, 128, 9),
        (GemmTile(128, 3), BF16, "halves", 64, 64, 260),
    ],
    ids=str,
)
def test_products(
    gemm: GemmTile,
    dtype: torch.dtype,
    order: str,
    H: int,
    I: int,
    T: int,
    late: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tiles that are full, ragged, of one row; an expert with no token, whose weights are NaN; ids of no expert."""
    kernels = HostKernels(tmp_path, late)
    assert worst_row(kernels, monkeypatch, gemm, *some_tokens(T, H, I, dtype, order)) < bound_of(dtype)


def test_no_row_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = HostKernels(tmp_path, late=True)
    kernels.use(monkeypatch)
    experts = experts_of(2, 64, 64, BF16)
    plan = plan_of(Problem.of(3, 1, experts, BF16), GemmTile(32, 4), Sorters(128))
    hidden, act, out = (torch.full((3, 64), 7.0, dtype=BF16) for _ in range(3))
    words = torch.zeros(plan.words.count, dtype=torch.int32)
    ids = torch.full((3, 1), -1, dtype=torch.int32)
    routing = Routing.from_topk(ids, torch.ones(3, 1), 2)
    call = Call(hidden, routing, experts, torch.empty(3, 64, dtype=BF16), False)
    SM80.launch(plan, call, (act, out, words))
    assert kernels.sound and bool((act == 7).all() and (out == 7).all())


@pytest.mark.parametrize(
    ("line", "instead", "late"),
    [
        ("copies_wait<STAGES - 2>();", "copies_wait<STAGES - 1>();", True),
        ("__syncthreads();  // this stage", "// this stage", True),
        ("__syncthreads();  // this stage", "// this stage", False),
        ("const int next = step + STAGES - 1;", "const int next = step + STAGES - 2;", True),
        ("__syncthreads();  // other warps", "// other warps", False),
        ("const int row = tile.first + min(", "const int row = min(", True),
        ("(chunk ^ (row % 8)) * 16", "(chunk ^ (row % 4)) * 8", True),
        ("row < tile.rows && channel", "channel", True),
        ("rows + place(group * 8 + lane % 8", "rows + place(group * 8 + lane / 4", True),
    ],
)
def test_a_mistake_is_seen(
    line: str, instead: str, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.randint(0, 3, (50, 2), dtype=torch.int32)
    experts = experts_of(3, 320, 64, BF16)
    kernels = HostKernels(tmp_path, late, with_mistake(tmp_path, NAME, line, instead))
    assert worst_row(kernels, monkeypatch, GemmTile(32, 4), ids, experts) > 0.1
