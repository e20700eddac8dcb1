"""The kernel of bucketed attention without a GPU: its source on the host, with fibers for threads."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
NEWEST_8 = {3: [40, 0], 8: [40, 9]}


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


@dataclass(frozen=True)
class Call:
    """spread: of the keys; larger ones make the largest score grow from piece to piece."""

    n: int
    heads: int
    of: bucketed.Plan
    slots: dict[int, list[int]] = field(default_factory=lambda: MIXED)
    spread: float = 1.0

    def error(self, host: HostKernels, monkeypatch: pytest.MonkeyPatch) -> float:
        rows = filled(self.slots, 1, 128, holes=0.2, outside=float("nan"), spread=self.spread)
        return _error(host, monkeypatch, rows, self.n, self.heads, self.of)


ONE = Call(1, 8, bucketed.Plan(2, 1))
GROWING = replace(ONE, spread=8.0)
CAUSAL_8 = Call(3, 4, bucketed.Plan(4, 2, tiles=2), NEWEST_8)


@pytest.mark.parametrize(
    ("call", "late"),
    [
        (Call(1, 6, bucketed.Plan(2, 3)), True),
        (Call(3, 4, bucketed.Plan(4, 2, tiles=2)), False),
        (CAUSAL_8, False),
        (ONE, False),
        (GROWING, False),
    ],
    ids=["one query", "three queries", "newest tokens of 8 bits", "no splits", "a new maximum"],
)
def test_kernel(call: Call, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call.error(HostKernels(tmp_path, late), monkeypatch) < 0.01


@pytest.mark.parametrize(
    ("line", "instead", "call"),
    [
        ("held = inside && !(scale < 0.0f);", "held = inside;", ONE),
        ("{scales[1], room > 8},", "{scales[1], true},", ONE),
        ("fmaf(half, sums[n][i], state", "fmaf(half, 0.9f * sums[n][i], state", ONE),
        ("state.offsets[n][i] *= shrink;", "", GROWING),
        ("state.total[n][i] *= shrink;", "", GROWING),
        ("state.o[n][t][i] *= shrink;", "", GROWING),
        ("(words[2] >> down_of(2) & 0x01000100u)", "(words[2] >> down_of(1) & 0x01000100u)", ONE),
        ("        rescale<BITS, false>(state);\n", "", ONE),
        ("if (CAUSAL && BITS == 8) {", "if (false) {", CAUSAL_8),
    ],
    ids=[
        "holes",
        "the end of a page",
        "offsets",
        "offsets at a new maximum",
        "sums of weights at a new maximum",
        "the output at a new maximum",
        "the last pair of 3 bits",
        "tiers",
        "later tokens of 8 bits",
    ],
)
def test_a_mistake_does_not_pass(
    line: str, instead: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = with_mistake(tmp_path, "sm80/bucketed_attention", line, instead)
    assert not call.error(HostKernels(tmp_path, sources=wrong), monkeypatch) < 0.01
