"""Bucketed attention on a GPU against its definition in torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bucketed_tiers import Rows, bound_of, filled, lost
from cuda_gpus import no_host_sync
from ttnn_moe.cuda.attention import bucketed, bucketed_triton
from ttnn_moe.kv.bucketed.quantise import rotate
from ttnn_moe.kv.bucketed.reference import add_mass, quantized_attention_bucketed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")]

RAGGED = {2: [700, 0, 31, 1], 3: [999, 0, 0, 64], 4: [130, 65, 0, 0], 8: [100, 7, 0, 0], 16: [64, 8, 0, 0]}


def _call(rows: Rows, n: int, heads: int, of: bucketed.Plan | None = None) -> tuple[Tensor, Tensor]:
    T = len(rows.lengths)
    q = torch.randn(T, n, heads, 128, device="cuda").bfloat16()
    at = torch.arange(T - 1, -1, -1, device="cuda")
    positions = rows.lengths[at] - n
    want = quantized_attention_bucketed(q.float(), rows.tiers, at, positions if n > 1 else None)
    with no_host_sync():
        got = bucketed.launch(q, rows.tiers, at, positions, of=of)
    return got, want


def _error(got: Tensor, want: Tensor) -> float:
    """Largest error of an entry, relative to its largest output."""
    scale = want.abs().amax((1, 2, 3)).clamp_min(1e-6)
    return float(((got.float() - want).abs().amax((1, 2, 3)) / scale).amax())


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("slots", [[1], [500, 0, 129]], ids=str)
def test_one_tier(bits: int, slots: list[int]) -> None:
    rows = filled({bits: slots}, 2, 128, outside=float("nan"), device="cuda")
    assert _error(*_call(rows, 1, 16)) < 0.01


@pytest.mark.parametrize("launch", [bucketed.launch, bucketed_triton.launch], ids=["CUDA C++", "Triton"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16])
def test_a_tier_loses_what_its_bits_lose(bits: int, launch: Callable[..., Tensor]) -> None:
    """Attention to one tier, against attention to the keys and values before they were quantised."""
    rows = filled({bits: [129, 40]}, 2, 128, holes=0.1, outside=float("nan"), device="cuda")
    q, at = torch.randn(2, 1, 16, 128, device="cuda").bfloat16(), torch.arange(2, device="cuda")
    # the output is bf16
    assert lost(launch(q, rows.tiers, at), q, rows) < bound_of(bits) + 0.02


@pytest.mark.parametrize(
    ("n", "kv_heads", "heads"), [*((n, 4, 32) for n in range(1, 9)), (1, 2, 6), (5, 2, 6), (1, 1, 16)], ids=str
)
def test_queries_and_heads(n: int, kv_heads: int, heads: int) -> None:
    rows = filled(RAGGED, kv_heads, 128, holes=0.1, outside=float("nan"), device="cuda")
    if n > 1:  # the newest tokens are in a tier of 8 or 16 bits
        rows.lengths[2:] = 10**6
    assert _error(*_call(rows, n, heads)) < 0.01


@pytest.mark.parametrize("of", [bucketed.Plan(w, s) for w, s in [(4, 1), (4, 9), (8, 2), (16, 1)]])
@pytest.mark.parametrize("page", [64, 128])
def test_plans_and_pages(of: bucketed.Plan, page: int) -> None:
    rows = filled(RAGGED, 2, 128, page=page, spread=4.0, device="cuda")
    assert _error(*_call(rows, 1, 16, of)) < 0.01


def test_rotation() -> None:
    rows = filled(RAGGED, 2, 128, device="cuda")
    q, at = torch.randn(4, 1, 16, 128, device="cuda").bfloat16(), torch.arange(4, device="cuda")
    want = rotate(quantized_attention_bucketed(rotate(q.float()), rows.tiers, at))
    for of in (bucketed.Plan(4, 1), bucketed.Plan(4, 3)):
        assert _error(bucketed.launch(q, rows.tiers, at, rotate=True, of=of), want) < 0.01


@pytest.mark.parametrize("n", [1, 3])
def test_mass_of_pages(n: int) -> None:
    rows = filled(RAGGED, 2, 128, holes=0.1, outside=float("nan"), device="cuda")
    q, at = torch.randn(4, n, 16, 128, device="cuda").bfloat16(), torch.arange(4, device="cuda")
    want, got = ([torch.zeros(len(tier.payload), device="cuda") for tier in rows.tiers] for _ in range(2))
    add_mass(q.float(), rows.tiers, at, None, None, want)
    for of in (None, bucketed.Plan(4, 1, 1 if n == 1 else 2)):
        out = bucketed.launch(q, rows.tiers, at, mass=got, of=of)
        assert _error(out, quantized_attention_bucketed(q.float(), rows.tiers, at)) < 0.01
    for one, two in zip(want, got, strict=True):
        assert torch.allclose(2 * one, two, rtol=0.02, atol=1e-3)


def test_a_token_of_nan_stays_in_its_row() -> None:
    rows = filled(RAGGED, 1, 128, nan=(0, 600), device="cuda")
    got, want = _call(rows, 1, 8)
    assert bool(got[3].isnan().all()) and _error(got[:3], want[:3]) < 0.01


def test_padding_gives_zero_and_reads_nothing() -> None:
    rows = filled(RAGGED, 2, 128, device="cuda")
    q = torch.randn(4, 1, 16, 128, device="cuda").bfloat16()
    at, n = torch.arange(4, device="cuda"), torch.tensor(2, dtype=torch.int32, device="cuda")
    got = bucketed.launch(q, rows.tiers, at, num_tokens=n)
    want = quantized_attention_bucketed(q.float(), rows.tiers, at)
    assert not bool(got[2:].any()) and _error(got[:2], want[:2]) < 0.01


def test_repetition_is_equal_and_a_graph_follows_the_counts() -> None:
    rows = filled(RAGGED, 4, 128, device="cuda")
    q = torch.randn(4, 1, 32, 128, device="cuda").bfloat16()
    at, out = torch.arange(4, device="cuda"), torch.empty_like(q)
    first = bucketed.launch(q, rows.tiers, at)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bucketed.launch(q, rows.tiers, at, out=out)
    for _ in range(20):
        graph.replay()
        assert torch.equal(out, first)
    rows.tiers[1].counts.fill_(0)
    rows.tiers[0].counts[0] = 77
    graph.replay()
    assert _error(out, quantized_attention_bucketed(q.float(), rows.tiers, at)) < 0.01
