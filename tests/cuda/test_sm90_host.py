"""Hopper's kernels without a GPU: their sources on the host, with fibers for threads and the PTX ISA's fragments.

Copies and products that come as early or as late as they may, poison in what nobody may read, and sources with one line
changed show that a mistake does not pass.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from host_kernels import GXX, HostKernels, with_mistake
from host_products import bound_of, experts_of, some_tokens, worst_row
from qwen3_attention_cases import paged, tiles_of
from qwen3_kernel_cases import error
from ttnn_moe.cuda.attention import prefill_sm90
from ttnn_moe.cuda.attention.memory import Memory
from ttnn_moe.cuda.moe.sm90 import MlpTile
from ttnn_moe.kv import torch_forms
from ttnn_moe.kv.step import Span

pytestmark = pytest.mark.skipif(GXX is None, reason="g++ is not installed")
lateness = pytest.mark.parametrize("late", [False, True], ids=["early", "late"])


def _attention_error(
    host: HostKernels, monkeypatch: pytest.MonkeyPatch, spans: list[Span], heads: int, kv: int, page: int, capacity: int
) -> float:
    """Largest relative error of a row of queries; infinite for what nobody may do."""
    host.use(monkeypatch)
    prefill_sm90._launch.cache_clear()
    rows, T = 2, sum(span.n for span in spans)
    q = torch.randn(T, heads, 128).bfloat16()
    keys, values = (torch.randn(rows, kv, capacity, 128).bfloat16() for _ in range(2))
    nothing = torch.zeros(0, dtype=torch.int64)
    want = torch_forms.prefill_attention(q.double(), Memory(keys.double(), values.double(), nothing, nothing), spans)
    for row in range(rows):
        used = max((span.past + span.n for span in spans if span.row == row), default=0)
        keys[row, :, used:] = values[row, :, used:] = float("nan")
    memory = Memory(keys, values, nothing, nothing)
    if page:
        memory = paged(memory, page)
    tiles = tiles_of(spans, keys)
    tiles = torch.cat((tiles, tiles.new_zeros(4)))
    out = torch.full((T + 128, heads, 128), 7.0).bfloat16()  # with room for what a wrong kernel writes
    prefill_sm90.launch(q, memory, tiles, out[:T])
    if not host.sound or not bool((out[T:] == 7).all()):
        return float("inf")
    return error(out[:T].flatten(0, 1), want.flatten(0, 1))


def _spans(*spans: tuple[int, int, int]) -> list[Span]:
    """Of (tokens, past, row)."""
    firsts = [sum(n for n, _, _ in spans[:i]) for i in range(len(spans))]
    return [Span(row, first, n, past) for (n, past, row), first in zip(spans, firsts, strict=True)]


@lateness
@pytest.mark.parametrize(
    ("spans", "heads", "kv", "page", "capacity"),
    [
        (_spans((1, 0, 1)), 1, 1, 0, 5),
        (_spans((130, 0, 0)), 2, 1, 0, 200),
        (_spans((40, 100, 1), (70, 0, 0)), 4, 2, 64, 150),
        (_spans((129, 64, 0), (1, 255, 1)), 2, 2, 16, 260),
        (_spans((300, 0, 1)), 1, 1, 256, 300),
    ],
    ids=str,
)
def test_attention_of_prompts(
    spans: list[Span],
    heads: int,
    kv: int,
    page: int,
    capacity: int,
    late: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    host = HostKernels(tmp_path, late)
    assert _attention_error(host, monkeypatch, spans, heads, kv, page, capacity) < 8e-3


@pytest.mark.parametrize(
    ("line", "instead", "late"),
    [
        ("if (first && item.keys() % TILE)", "if (false)", False),
        ("hide(scores, block * TILE, item.past + own);", "", False),
        ("next_block * TILE, next.past + own", "next_block * TILE, next.past", False),
        ("values, behind", "values, ahead", False),
        ("barrier_wait(shared.full(VALUES + v.at), v.parity);", "", True),
        ("if (more) barrier_wait(shared.full(KEYS + k.at), k.parity);", "", True),
        ("products_wait<1>();", "", True),
        ("scale_rows(sums, softmax.shrink);", "", False),
        ("static_cast<u64>(item.row) * pages_a_row", "0", False),
        ("item.head / GROUP", "0", False),
        ("softmax = Softmax();", "", False),
        ("if (row < item.queries)", "", False),
        ("next_q.next();", "", True),
        ("release(shared.empty(VALUES + v.at));", "", False),
    ],
)
def test_a_mistake_of_the_attention_is_seen(
    line: str, instead: str, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    host = HostKernels(tmp_path, late, with_mistake(tmp_path, "sm90/prefill_attention", line, instead))
    spans = _spans((40, 227, 1), (140, 0, 0))
    assert _attention_error(host, monkeypatch, spans, 4, 2, 64, 300) > 0.1


BF16, F16 = torch.bfloat16, torch.float16


@lateness
@pytest.mark.parametrize(
    ("gemm", "dtype", "order", "H", "I", "T", "together"),
    [
        (MlpTile(32, 3, 128), BF16, "halves", 64, 64, 1, 1),
        (MlpTile(32, 4, 128), BF16, "interleaved", 320, 64, 47, 4),
        (MlpTile(64, 3, 256), F16, "halves", 128, 192, 70, 2),
        (MlpTile(160, 4, 256), BF16, "interleaved", 64, 128, 190, 4),
    ],
    ids=str,
)
def test_products(
    gemm: MlpTile,
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
    """Tiles that are full, ragged, of one row; blocks that run one after the other, and at once."""
    host = HostKernels(tmp_path, late, together=together)
    assert worst_row(host, monkeypatch, gemm, *some_tokens(T, H, I, dtype, order)) < bound_of(dtype)


@pytest.mark.parametrize(
    ("line", "instead", "late"),
    [
        ("if (item.kind == DOWN) wait_for_tile(work.tiles + item.tile, 2 * work.gate_up_blocks);", "", False),
        ("if (!DOWN && thread == 0) add_release(done, 1);", "", False),
        ("copies_arrive(shared.full + 8 * turn.at);", "barrier_arrive(shared.full + 8 * turn.at);", True),
        ("products_wait<1>();", "", True),
        ("release(shared, before);", "", False),
        ("const int row = item.first + min(row_of_lane", "const int row = min(row_of_lane", False),
        ("if (first + row < item.rows && channel + chunk * 8 < width)", "if (channel + chunk * 8 < width)", False),
        ("(j % 2 ? odd : even)", "(j % 2 ? even : odd)", False),
    ],
)
def test_a_mistake_of_the_products_is_seen(
    line: str, instead: str, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 3, (50, 2), dtype=torch.int32)
    experts = experts_of(3, 320, 64, BF16)
    sources = with_mistake(tmp_path, "sm90/grouped_mlp", line, instead)
    host = HostKernels(tmp_path, late, sources, together=4)
    assert worst_row(host, monkeypatch, MlpTile(32, 3, 128), ids, experts) > 0.1
