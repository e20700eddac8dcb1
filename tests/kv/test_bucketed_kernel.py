"""The kernel of bucketed attention without a GPU: its source on the host, with fibers for threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bucketed_tiers import Rows, filled
from host_kernels import GXX, HostKernels
from ttnn_moe.cuda.attention import bucketed
from ttnn_moe.kv.bucketed.quantise import rotate
from ttnn_moe.kv.bucketed.reference import quantized_attention_bucketed

pytestmark = pytest.mark.skipif(GXX is None, reason="g++ is not installed")

MIXED = {2: [150, 0], 3: [33, 0], 4: [3, 65], 8: [40, 0], 16: [20, 9]}


def _error(
    host: HostKernels, monkeypatch: pytest.MonkeyPatch, rows: Rows, kv_heads: int, n: int, heads: int, of: bucketed.Plan
) -> float:
    """Largest error of a query's output, relative to the largest output; infinite for what nobody may do."""
    host.use(monkeypatch)
    bucketed._launches.cache_clear()
    q = torch.randn(2, n, heads, 128).bfloat16()
    at = torch.tensor([1, 0])
    positions = rows.lengths[at] - n
    want = quantized_attention_bucketed(q.float(), rows.tiers, at, positions)
    rotated = n > 1
    if rotated:
        want = rotate(quantized_attention_bucketed(rotate(q.float()), rows.tiers, at, positions))
    got = bucketed.launch(q, rows.tiers, at, positions, rotate=rotated, of=of)
    error = (got.float() - want).abs().amax() / want.abs().amax()
    return float(error) if host.sound else float("inf")


@pytest.mark.parametrize(
    ("counts", "n", "heads", "of"),
    [
        ({2: [150, 1]}, 1, 8, bucketed.Plan(2, 1)),
        ({3: [150, 1]}, 1, 8, bucketed.Plan(2, 1)),
        ({4: [150, 1]}, 1, 8, bucketed.Plan(2, 1)),
        ({8: [150, 1]}, 1, 8, bucketed.Plan(2, 1)),
        ({16: [100, 1]}, 1, 8, bucketed.Plan(2, 1)),
        (MIXED, 1, 6, bucketed.Plan(2, 3)),
        (MIXED, 3, 4, bucketed.Plan(4, 2, tiles=2)),
    ],
    ids=["2", "3", "4", "8", "16", "mixed", "three queries"],
)
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_kernel(
    counts: dict[int, list[int]],
    n: int,
    heads: int,
    of: bucketed.Plan,
    late: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = filled(counts, 1, 128, holes=0.2, outside=float("nan"))
    assert _error(HostKernels(tmp_path, late), monkeypatch, rows, 1, n, heads, of) < 0.01
