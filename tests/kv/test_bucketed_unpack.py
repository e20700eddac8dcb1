"""A packed row as bf16 has the bits of its definition: the kernel's source on the host, or on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bucketed_tiers import Rows, filled
from host_kernels import GXX, HostKernels, used, with_mistake
from ttnn_moe.cuda.attention import bucketed_unpack
from ttnn_moe.cuda.attention.bucketed_unpack import WHOLE, Room, numbers_of
from ttnn_moe.kv.bucketed.cache import BucketedCache
from ttnn_moe.kv.bucketed.prompts import PROMPT, attend_piece, prompt_attention
from ttnn_moe.kv.bucketed.quantise import rotate
from ttnn_moe.kv.cache import CacheSizes

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
pytestmark = [pytest.mark.skipif(not GPU and GXX is None, reason="g++ is not installed"), *[pytest.mark.gpu] * GPU]
MIXED = {2: [90, 0], 3: [33, 0], 4: [3, 65], 8: [40, 0], 16: [20, 9]}


def piece(rows: Rows, row: int, n: int) -> tuple[Tensor, Tensor, Tensor, Room]:
    """Keys and values of a piece's tokens, scales of keys, and a room of NaN, some of it past the end."""
    kv_heads, past = rows.tiers[0].kv_heads, int(rows.lengths[row])
    k, v = torch.randn(2, n, kv_heads, 128, device=DEVICE).bfloat16()
    memory = torch.full((numbers_of(kv_heads, past + n + WHOLE),), float("nan"), device=DEVICE).bfloat16()
    return k, v, 0.5 + torch.rand(128, device=DEVICE), Room.of(memory, kv_heads, past, n)


def same(rows: Rows, row: int, n: int) -> bool:
    """Whether the kernel's keys and values have the bits of the definition, and zeros where attention reads on."""
    k, v, scale, room = piece(rows, row, n)
    for tier in rows.tiers:  # a slot that a token left still has its position
        tier.token_ids.clamp_(min=0)
    bucketed_unpack.unpack(room, k, v, rows.tiers, row, scale)
    packed = rows.dense(row) if room.past else (k[:0].float(), v[:0].float())
    by, end = (scale, torch.ones_like(scale)), room.past + n
    for got, own, levels, times in zip((room.memory.keys[0], room.memory.values[0]), (k, v), packed, by, strict=True):
        want = torch.cat(((rotate(levels.to(DEVICE)) * times).bfloat16(), own)).transpose(0, 1)
        read = -(-end // WHOLE) * WHOLE
        if not torch.equal(got[:, :end], want) or bool(got[:, end:read].count_nonzero()):
            return False
        assert bool(got[:, read:].isnan().all()), "nothing is written further on"
    return True


@pytest.mark.slow(8)
@pytest.mark.parametrize(
    ("counts", "kv_heads", "page", "row", "n"),
    [
        (MIXED, 2, 64, 0, 70),
        (MIXED, 1, 32, 1, 1),
        ({8: [0], 4: [0]}, 1, 64, 0, 128),
        *([({2: [70, 3000], 3: [0, 900], 8: [0, 192]}, 4, 128, 1, 500)] if GPU else []),
    ],
    ids=["five tiers", "another row", "no past", *["many"] * GPU],
)
def test_a_row_has_the_bits_of_its_definition(
    counts: dict[int, list[int]],
    kv_heads: int,
    page: int,
    row: int,
    n: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = used(HostKernels(tmp_path), monkeypatch, bucketed_unpack._launch)
    rows = filled(counts, kv_heads, 128, page=page, holes=0.2, outside=float("nan"), device=DEVICE)
    assert same(rows, row, n) and host.sound


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("!(first_of_fp16(scales[at]) < 0.0f)", "true"),
        ("if (of == 0) {", "if (false) {"),
        ("levels[1][row + q + 1][column + g] = static_cast<u16>(pair >> 16);", ""),
        ("x[0] *= scale.x,", ""),
        ("uint2 four = make_uint2(0, 0);", "uint2 four = make_uint2(1, 0);"),
    ],
    ids=["holes", "the last pair", "half of a pair", "scales of keys", "zeros behind"],
)
@pytest.mark.skipif(GPU, reason="on the host alone")
def test_a_mistake_does_not_pass(line: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = with_mistake(tmp_path, "sm80/bucketed_unpack", line, instead)
    used(HostKernels(tmp_path, sources=wrong), monkeypatch, bucketed_unpack._launch)
    assert not same(filled({3: [60], 16: [9]}, 1, 128, holes=0.2), 0, 5)


@pytest.mark.skipif(not GPU, reason="the kernel of prompts: on a GPU alone")
@pytest.mark.parametrize(("n", "group", "spread"), [(300, 8, 1.0), (1000, 4, 4.0)], ids=str)
def test_attention_of_a_long_piece(n: int, group: int, spread: float) -> None:
    rows = filled({2: [0, 1700], 8: [0, 192]}, 2, 128, holes=0.1, outside=float("nan"), spread=spread, device=DEVICE)
    k, v, scale, room = piece(rows, 1, n)
    q = torch.randn(n, 2 * group, 128, device=DEVICE).bfloat16()
    at, row = torch.arange(n, device=DEVICE), torch.tensor([1], device=DEVICE)
    explained, _ = PROMPT.explain(q.device, q, at, None, 0, k, v, rows.tiers, 1, scale, room)
    assert explained == bucketed_unpack.NAME
    got = prompt_attention(q, at, None, 0, k, v, rows.tiers, 1, scale, room).float()
    want = attend_piece(q, rotate(q.float() * scale), at, k, v, rows.tiers, row).float()
    assert float((got - want).norm(dim=-1).amax() / want.norm(dim=-1).mean()) < 0.02


@pytest.mark.skipif(not GPU, reason="on a GPU alone")
def test_long_pieces_of_two_rows_attend_as_short_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one step, beside a row that decodes; a piece of a step may be short."""
    sizes = CacheSizes(2, 16, 2, 128, torch.bfloat16, torch.device("cuda"))
    unpack, ran, out = bucketed_unpack.unpack, list[tuple[int, int]](), list[list[Tensor]]()

    def spy(room: Room, *args: Any) -> None:
        ran.append((room.past, room.n))
        unpack(room, *args)

    monkeypatch.setattr(bucketed_unpack, "unpack", spy)
    for least in (64, 10**6):
        monkeypatch.setattr(bucketed_unpack, "least_queries", lambda device, least=least: least)
        cache, random = BucketedCache(sizes, 3, 2048, 96, 3), torch.Generator("cuda").manual_seed(0)
        for row in range(3):
            cache.open(row, 2048)
        out.append([])
        steps = ([(0, 500), (1, 300), (2, 9)], []), ([(0, 400), (1, 300)], [(2, 9)]), ([(1, 20), (0, 64)], [(2, 10)])
        for chunks, decoding in steps:
            step = cache.prefill(chunks, [0], decoding)
            for layer in range(sizes.layers):
                q, k, v = (
                    torch.randn(len(step.rows), n, 128, generator=random, device="cuda").bfloat16() for n in (16, 2, 2)
                )
                cache.write(layer, k, v, step)
                out[-1].append(cache.attend(layer, q, step))
    assert ran == [(500, 400), (300, 300)] * 2 + [(900, 64)] * 2
    for got, want in zip(*out, strict=True):
        assert float((got.float() - want.float()).norm(dim=-1).amax() / want.float().norm(dim=-1).mean()) < 0.02
