"""The kernel of prompts over a packed past against its definition: its source on the host, or on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bucketed_tiers import Rows, filled
from host_kernels import GXX, HostKernels, used, with_mistake
from ttnn_moe.cuda.attention import bucketed_prompt
from ttnn_moe.cuda.attention.bucketed_prompt import Own
from ttnn_moe.kv.bucketed.prompts import attend_piece
from ttnn_moe.kv.bucketed.quantise import rotate

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
pytestmark = [pytest.mark.skipif(not GPU and GXX is None, reason="g++ is not installed"), *[pytest.mark.gpu] * GPU]
MIXED = {2: [90, 0], 3: [33, 0], 4: [3, 65], 8: [40, 0], 16: [20, 9]}


KEPT = bucketed_prompt._launches, bucketed_prompt._packer


def error(
    rows: Rows, n: int, heads: int, row: int, at: Tensor | None = None, splits: int = 1, nan: bool = False
) -> float:
    """Largest error of a piece of n tokens, the second of its step, relative to the largest output."""
    kv_heads, D = rows.tiers[0].kv_heads, 128
    k, v = torch.randn(2, 5 + n, kv_heads, D, device=DEVICE).bfloat16()
    at = torch.arange(n, device=DEVICE) if at is None else at
    if nan:
        k[5 + n - 1, 0, 3] = float("nan")
    q, scale = torch.randn(len(at), heads, D, device=DEVICE).bfloat16(), 0.5 + torch.rand(D, device=DEVICE)
    own = Own.of([(0, 5), (5, n)], kv_heads, rows.tiers[0].page, k.device)
    own.scales.fill_(1), own.payload.view(torch.bfloat16).fill_(float("nan"))
    own.pack(k, v, scale)
    got = bucketed_prompt.launch(q, at, own, 1, n, rows.tiers, row, scale, splits)
    turned, past = rotate(q.float() * scale), torch.tensor([row], device=DEVICE)
    want = attend_piece(q, turned, at, k[5:], v[5:], rows.tiers, past).float()
    if nan:
        assert bool(got[-1].isnan().any())
        got, want = got[:-1], want[:-1]
    return float((got.float() - want).abs().amax() / want.abs().amax())


@pytest.mark.slow(8)
@pytest.mark.parametrize(
    ("n", "heads", "at"), [(7, 6, None), (40, 4, [3, 39]), *([(300, 32, None)] if GPU else [])], ids=str
)
def test_a_piece_and_what_came_before(
    n: int, heads: int, at: list[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = used(HostKernels(tmp_path, late=True), monkeypatch, *KEPT)
    rows = filled(MIXED, 1, 128, holes=0.2, outside=float("nan"), spread=4.0 if at else 1.0, device=DEVICE)
    some = None if at is None else torch.tensor(at, device=DEVICE)
    assert error(rows, n, heads, 0, some, 3 if at else 1) < 0.02 and host.sound


@pytest.mark.skipif(not GPU, reason="many queries and keys: on a GPU alone")
@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16])
@pytest.mark.parametrize(("n", "group", "page"), [(2, 1, 64), (130, 8, 128), (1000, 5, 64)], ids=str)
def test_each_tier(bits: int, n: int, group: int, page: int) -> None:
    rows = filled({bits: [0, 1700]}, 2, 128, page=page, outside=float("nan"), device=DEVICE)
    assert error(rows, n, 2 * group, 1) < 0.02 and error(rows, n, 2 * group, 1, splits=5) < 0.02
    assert error(rows, n, 2 * group, 0) < 0.02, "no past"


@pytest.mark.skipif(not GPU, reason="on a GPU alone")
def test_a_token_of_nan_hides_from_others() -> None:
    assert error(filled(MIXED, 2, 128, device=DEVICE), 64, 8, 0, nan=True) < 0.02


@pytest.mark.skipif(GPU, reason="on the host alone")
@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("const bool is = 8 * i + lane % 4 * 2 + e < left && !(k < 0.0f);", "const bool is = !(k < 0.0f);"),
        ("if (kind < 4 && !packed) rescale(state, power(-24)), packed = true;", "packed = true;"),
        ("lane % 4 * 2 + e > sees[m][h]", "lane % 4 * 2 + e > sees[m][h] + 1"),
    ],
    ids=["the end of a unit", "the power", "causal"],
)
def test_a_mistake_does_not_pass(line: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = with_mistake(tmp_path, "sm80/bucketed_prompt", line, instead)
    used(HostKernels(tmp_path, sources=wrong), monkeypatch, *KEPT)
    rows = filled(MIXED, 1, 128, holes=0.2, outside=float("nan"))
    assert not error(rows, 7, 6, 0) < 0.02
