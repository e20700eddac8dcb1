"""Bucketed attention's Triton kernel against its definition: in Triton's interpreter, or on a GPU."""

from __future__ import annotations

import pytest
import torch

from bucketed_tiers import filled
from ttnn_moe.cuda.attention import bucketed_triton
from ttnn_moe.kv.bucketed import attention
from ttnn_moe.kv.bucketed.reference import quantized_attention_bucketed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RAGGED = {2: [150, 0], 3: [40, 33], 4: [3, 0], 8: [33, 0], 16: [9, 10]}


TOLERANCES = {torch.float32: 2e-5, torch.float16: 0.005, torch.bfloat16: 0.04}
SIZES = [(32, 4, 1, torch.float32), (96, 2, 3, torch.float32), (64, 2, 1, torch.float32), (64, 4, 2, torch.float16)]
if DEVICE == "cuda":  # the interpreter has no bf16
    SIZES += [(D, 4, n, dtype) for dtype in (torch.float16, torch.bfloat16) for D in (96, 128) for n in (1, 3)]


@pytest.mark.parametrize(("D", "heads", "n", "dtype"), SIZES, ids=str)
def test_mixed_tiers(D: int, heads: int, n: int, dtype: torch.dtype) -> None:
    rows = filled(RAGGED, 2, D, holes=0.1, outside=float("nan"), device=DEVICE)
    q, at = torch.randn(2, n, heads, D, device=DEVICE).to(dtype), torch.tensor([1, 0], device=DEVICE)
    positions = rows.lengths[at] - n
    want = quantized_attention_bucketed(q.float(), rows.tiers, at, positions)
    got = bucketed_triton.launch(q, rows.tiers, at, positions)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), want, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_queries_in_another_order_of_memory() -> None:
    rows, at = filled(RAGGED, 2, 32, device=DEVICE), torch.tensor([1, 0], device=DEVICE)
    q = torch.randn(2, 4, 3, 32, device=DEVICE).transpose(1, 2)
    want = quantized_attention_bucketed(q, rows.tiers, at)
    torch.testing.assert_close(bucketed_triton.launch(q, rows.tiers, at), want, rtol=2e-5, atol=2e-5)


def test_empty_rows_nan_and_padding() -> None:
    rows = filled({3: [20, 40, 40, 40], 16: [0, 1, 0, 1]}, 1, 32, nan=(1, 7), device=DEVICE)
    rows.tiers[0].counts[0] = 0
    q, at = torch.randn(4, 1, 2, 32, device=DEVICE), torch.arange(4, device=DEVICE)
    got = bucketed_triton.launch(q, rows.tiers, at, num_tokens=torch.tensor(3, dtype=torch.int32, device=DEVICE))
    want = quantized_attention_bucketed(q, rows.tiers, at)
    assert not bool(got[0].any()) and bool(got[1].isnan().all()) and not bool(got[3].any())
    assert torch.allclose(got[2], want[2], atol=2e-5)


def test_the_operator_takes_it() -> None:
    rows = filled({4: [40]}, 1, 32, device=DEVICE)
    q, at = torch.randn(1, 1, 2, 32, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    runs, _ = attention.ATTENTION.explain(q.device, q, rows.tiers, at, None, None, None, False, None, None)
    assert runs == bucketed_triton.NAME
    got = attention.quantized_attention_bucketed(q, rows.tiers, at)
    assert torch.allclose(got, quantized_attention_bucketed(q, rows.tiers, at), atol=2e-5)
