"""The kernel of bucketed attention without a GPU: its source on the host, with fibers for threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bucketed_tiers import Rows, filled
from host_kernels import GXX, HostKernels, with_mistake
from ttnn_moe.cuda.attention import bucketed
from ttnn_moe.kv.bucketed.quantise import rotate
from ttnn_moe.kv.bucketed.reference import add_mass, quantized_attention_bucketed

pytestmark = pytest.mark.skipif(GXX is None, reason="g++ is not installed")

MIXED = {2: [90, 0], 3: [33, 0], 4: [3, 65], 8: [40, 0], 16: [20, 9]}


def _error(
    host: HostKernels, monkeypatch: pytest.MonkeyPatch, rows: Rows, n: int, heads: int, of: bucketed.Plan
) -> float:
    """Largest error of a query's output, relative to the largest output; infinite for what nobody may do."""
    host.use(monkeypatch)
    bucketed._launches.cache_clear()
    q = torch.randn(2, n, heads, 128).bfloat16()
    at = torch.tensor([1, 0])
    positions = rows.lengths[at] - n
    want = quantized_attention_bucketed(q.float(), rows.tiers, at, positions)
    rotated, scale = n > 1, 1 + torch.rand(128) if n > 1 else None
    if rotated:
        want = rotate(quantized_attention_bucketed(rotate(q.float() * scale), rows.tiers, at, positions))
    masses = [[torch.zeros(len(tier.payload)) for tier in rows.tiers] for _ in range(2)]
    add_mass(rotate(q.float() * scale) if rotated else q.float(), rows.tiers, at, positions, None, masses[0])
    mass = masses[1] if of.splits > 1 else None
    got = bucketed.launch(q, rows.tiers, at, positions, rotate=rotated, mass=mass, q_scale=scale, of=of)
    if mass is not None:
        assert all(torch.allclose(*both, rtol=0.02, atol=1e-3) for both in zip(*masses, strict=True))
    error = (got.float() - want).abs().amax() / want.abs().amax()
    return float(error) if host.sound else float("inf")


@pytest.mark.parametrize(
    ("n", "heads", "of", "late"),
    [
        (1, 6, bucketed.Plan(2, 3), True),
        (3, 4, bucketed.Plan(4, 2, tiles=2), False),
        (1, 8, bucketed.Plan(2, 1), False),
    ],
    ids=["one query", "three queries", "no splits"],
)
def test_kernel(
    n: int, heads: int, of: bucketed.Plan, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = filled(MIXED, 1, 128, holes=0.2, outside=float("nan"))
    assert _error(HostKernels(tmp_path, late), monkeypatch, rows, n, heads, of) < 0.01


@pytest.mark.parametrize(
    ("line", "instead", "spread"),
    [
        ("held = inside && !(scale < 0.0f);", "held = inside;", 1.0),
        ("{scales[1], room > 8},", "{scales[1], true},", 1.0),
        ("fmaf(half, sums[n][i], state", "fmaf(half, 0.9f * sums[n][i], state", 1.0),
        ("state.offsets[n][i] *= shrink;", "", 8.0),
        ("(words[2] >> down_of(2) & 0x01000100u)", "(words[2] >> down_of(1) & 0x01000100u)", 1.0),
        ("        rescale<BITS, false>(state);\n", "", 1.0),
    ],
    ids=["holes", "the end of a page", "offsets", "a new maximum", "the last pair of 3 bits", "tiers"],
)
def test_a_mistake_does_not_pass(
    line: str, instead: str, spread: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = filled(MIXED, 1, 128, holes=0.2, outside=float("nan"), spread=spread)
    wrong = with_mistake(tmp_path, "sm80/bucketed_attention", line, instead)
    host = HostKernels(tmp_path, sources=wrong)
    assert not _error(host, monkeypatch, rows, 1, 8, bucketed.Plan(2, 1)) < 0.01
