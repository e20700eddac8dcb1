"""sm80/grouped_mlp.cu without a GPU: its source on the host, with fibers for threads and the PTX ISA's fragments.

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
from ttnn_moe.cuda.moe.sm80 import SM80, WarpTile
from ttnn_moe.cuda.moe.sort import Sorters

NAME = "sm80/grouped_mlp"
pytestmark = pytest.mark.skipif(GXX is None, reason="g++ is not installed")


BF16, F16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize(
    ("gemm", "dtype", "order", "H", "I", "T", "together"),
    [
        (WarpTile(2, 2, 32, 4), BF16, "halves", 64, 64, 1, 1),
        (WarpTile(1, 2, 32, 6), BF16, "interleaved", 320, 64, 47, 3),
        (WarpTile(2, 2, 64, 3, k_block=32), F16, "halves", 64, 192, 35, 1),
        (WarpTile(1, 4, 64, 2), BF16, "interleaved", 64, 128, 33, 3),
        (WarpTile(4, 2, 160, 3), F16, "halves", 320, 64, 9, 1),
        (WarpTile(4, 2, 160, 3), BF16, "halves", 64, 64, 170, 1),
        (WarpTile(4, 1, 48, 3), BF16, "halves", 64, 64, 30, 1),
    ],
    ids=str,
)
def test_products(
    gemm: WarpTile,
    dtype: torch.dtype,
    order: str,
    H: int,
    I: int,
    T: int,
    together: int,
    late: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tiles that are full, ragged, of one row; an expert with no token, whose weights are NaN; ids of no expert.

    Blocks that run one after the other, and at once.
    """
    kernels = HostKernels(tmp_path, late, together=together)
    assert worst_row(kernels, monkeypatch, gemm, *some_tokens(T, H, I, dtype, order)) < bound_of(dtype)


def test_no_row_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = HostKernels(tmp_path, late=True)
    kernels.use(monkeypatch)
    experts = experts_of(2, 64, 64, BF16)
    plan = plan_of(Problem.of(3, 1, experts, BF16), WarpTile(2, 2, 32, 4), Sorters(128))
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
        ("__syncthreads();  // the next stage", "// the next stage", True),
        ("(here == first ? end : here) - STAGE_BYTES", "here", False),
        ("int index = next.of.first + row", "int index = row", True),
        ("row % 8 : row / 2 % 4)) * 16", "row % 4 : row / 2 % 4)) * 8", True),
        ("const bool valid = 8 * j < left;", "const bool valid = 8 * j < left + 8;", True),
        ("lane / 16 * 8 + lane % 8, lane / 8 % 2", "lane / 4, lane / 8 % 2", True),
        ("r % 2 + r / 2 % 4 * 8 + r / 8 % 4 * 2", "r % 32", True),
        ("if (channel >= width) return;", "", True),
        ("while (!complete(item.tile)) {", "while (false) {", False),
        ("        if (done >= 0) loader.made(done);", "", False),
        ("min(m, valid - 1) * (is_down ? 64 : 32)", "min(m, valid - 1) * 64", True),
        ("if (next.kind == NONE || (next.kind == DOWN && !down)) {", "if (next.kind == NONE) {", False),
    ],
)
def test_a_mistake_is_seen(
    line: str, instead: str, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 3, (33, 2), dtype=torch.int32)
    experts = experts_of(3, 192, 64, BF16)
    kernels = HostKernels(tmp_path, late, with_mistake(tmp_path, NAME, line, instead), together=3)
    assert worst_row(kernels, monkeypatch, WarpTile(2, 2, 32, 4), ids, experts) > 0.1
