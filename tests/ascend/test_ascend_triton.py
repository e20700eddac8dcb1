"""The Triton kernels for Ascend in Triton's interpreter; triton-ascend's own: make test-ascend-triton."""

from __future__ import annotations

import importlib.util

import pytest

from paths import ROOT, SUPPORT
from processes import run_interpreted, run_python
from ttnn_moe.ascend import tiles

CASES = SUPPORT / "ascend_triton_cases.py"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@needs_triton
def test_interpreted() -> None:
    done = run_python(CASES, "interpret", TRITON_INTERPRET="1")
    assert done.stdout.count("ok   gate_up") == 4 and done.stdout.count("ok   combine") == 4


@pytest.mark.slow(50)
@needs_triton
def test_the_path_through_them_runs_the_contract() -> None:
    """In fp16: the interpreter cuts bf16 off."""
    large = "tokens_600 or tokens_128 or all_on_first or skewed or k16"
    chosen = f"float16 and not bfloat16 and (test_fused and not ({large}) or test_fp32_out and token_bound)"
    out = run_interpreted("tests/ascend/test_ascend_cases.py", "-k", chosen, TTNN_MOE_ASCEND_KERNELS="triton")
    assert "28 passed" in out, out[-300:]


SORTED = """
import ascend_stand_in, torch
from ttnn_moe.ascend import kernels, run
from ttnn_moe.ascend.layout import Weights
npu, g = ascend_stand_in.npu(), torch.Generator().manual_seed(0)
rows = torch.randn(70, 48, generator=g).half()
gate_up, down = (torch.randn(3, *shape, generator=g).half() / 7 for shape in ((80, 48), (48, 40)))
weights = Weights(gate_up.mT, down.mT)
counts = torch.tensor([1, 0, 65])  # more than a tile, an expert without a row, rows that are nobody's
got, want = (path.experts(npu, rows, counts, weights)[:66].float() for path in (kernels, run))
assert float((got - want).norm(dim=1).div(want.norm(dim=1)).max()) < 2e-3
"""


@needs_triton
def test_rows_that_come_sorted_go_through_them_as_they_lie() -> None:
    """What the exchange hands on: as through the chain of operators."""
    run_python("-c", SORTED, TRITON_INTERPRET="1")


def test_a_path_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from ttnn_moe.ascend import kernels
    from ttnn_moe.errors import ContractError

    monkeypatch.setenv("TTNN_MOE_ASCEND_KERNELS", "cublas")
    with pytest.raises(ContractError, match="operators or triton"):
        kernels.asked_for()


@pytest.mark.parametrize("block", tiles.BLOCKS_M)
def test_tiles_cover_every_row_once(block: int) -> None:
    import torch

    from ttnn_moe.ascend.kernels import tiles_of

    ends = torch.tensor([0, 1, 1 + block, 2 + 3 * block, 2 + 3 * block])
    found, listed, n = tiles_of(ends.diff(prepend=torch.zeros(1, dtype=torch.int64)), 5 * block, block)
    assert torch.equal(found, ends.int())
    seen = []
    for e, first in listed[: int(n)].tolist():
        seen += range(first, min(first + block, int(ends[e])))
    assert seen == list(range(2 + 3 * block))


def test_every_choice_is_a_tile_that_is_compiled() -> None:
    """make test-ascend-triton compiles BLOCKS_M and BLOCKS_H: no sizes lead to another tile."""
    assert {tiles.rows_of_tile(rows, E) for rows in range(0, 9000, 7) for E in (1, 8, 128, 1024)} == set(tiles.BLOCKS_M)
    assert {tiles.columns_of_block(H) for H in range(1, 65536, 13)} == set(tiles.BLOCKS_H)


def test_every_kernel_is_among_the_cases() -> None:
    folder = ROOT / "gpu_kernels" / "ascend"
    text = CASES.read_text()
    names = [path.stem for path in folder.glob("*.py")]
    assert sorted(names) == ["combine", "gate_up"]
    assert all(f"from ttnn_moe.gpu_kernels.ascend.{name} import {name}" in text for name in names)
