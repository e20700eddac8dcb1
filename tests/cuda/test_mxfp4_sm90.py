"""Hopper's MXFP4 products without a GPU: the order of channels, every byte, and the kernels on the host.

See test_sm90_host.py. On a GPU tests/cuda/test_mxfp4_gpu.py asks the same family.
"""

from __future__ import annotations

from ctypes import c_int32
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from host_kernels import GXX, HostKernels, with_mistake
from mxfp4_cases import GPT_OSS, Form, random_mxfp4, spoil
from ttnn_moe import Experts, Problem, Routing
from ttnn_moe.arranging import arranged
from ttnn_moe.backend import Numerics
from ttnn_moe.cuda.arch import HOPPER
from ttnn_moe.cuda.jit import load
from ttnn_moe.cuda.jit.spec import Spec
from ttnn_moe.cuda.moe.family import Call
from ttnn_moe.cuda.moe.sm90_mxfp4 import MXFP4_BOXES_SM90, MXFP4_SM90, Mxfp4Tile, fitted
from ttnn_moe.cuda.moe.sort import Sorters
from ttnn_moe.cuda.moe.sorted import SortedPlan
from ttnn_moe.formats.mxfp4 import dequantise
from ttnn_moe.selfcheck.oracle import oracle

BF16 = torch.bfloat16
on_host = pytest.mark.skipif(GXX is None, reason="g++ is not installed")


def _worst_row(
    host: HostKernels, monkeypatch: pytest.MonkeyPatch, tile: Mxfp4Tile, ids: Tensor, experts: Experts
) -> float:
    """The largest relative error of a token; infinite for what nobody may do, NaN and what nobody may write."""
    host.use(monkeypatch)
    T, K = ids.shape
    hidden, weights = torch.randn(T, experts.H).to(BF16), torch.rand(T, K) + 0.1
    problem = Problem.of(T, K, experts, BF16, torch.float32)
    family = MXFP4_BOXES_SM90 if tile.boxed else MXFP4_SM90
    given = arranged(experts) if tile.boxed else experts
    plan = SortedPlan(problem, HOPPER, fitted(tile, problem, HOPPER), Sorters(128))
    buffers = tuple(
        torch.full((buffer.shape[0] + 64, *buffer.shape[1:]), -(2**31) if buffer.dtype == torch.int32 else 1e4)
        .to(buffer.dtype)
        .contiguous()
        for buffer in family.scratch(plan)
    )
    out = torch.full((T, experts.H), 1e4)
    routing = Routing.from_topk(ids, weights, experts.E)
    family.launch(plan, Call(hidden, routing, given, out, False), buffers)
    pairs = int(((ids >= 0) & (ids < experts.E)).sum())
    if not host.sound or not all(bool((buffers[i][pairs:] == 1e4).all()) for i in (0, 1)):
        return float("inf")
    want = oracle(hidden, ids, weights, experts, Numerics(activation=BF16, expert_out=BF16))
    there = want.norm(dim=1) > 0
    errors = (out.double() - want).norm(dim=1)[there] / want.norm(dim=1)[there]
    return float(errors.nan_to_num(nan=float("inf")).max())


def _some_tokens(T: int, H: int, I: int, form: Form) -> tuple[Tensor, Experts]:
    """Ids of T tokens, two each, and four experts: one with no token, whose scales are NaN; ids of no expert."""
    torch.manual_seed(T)
    ids = torch.randint(0, 2, (T, 2), dtype=torch.int32)
    ids[::7, 0], ids[T // 2, 1] = 3, -1
    experts = random_mxfp4(4, H, I, form, "cpu")
    spoil(experts, 2)
    return ids, experts


LARGE = Form(order="interleaved")
NARROW, WIDE = Mxfp4Tile(32, 128, 2, 2, 3), Mxfp4Tile(64, 256, 2, 2, 2)
BY_COLUMNS = Mxfp4Tile(24, 256, 4, 3, 3, row_units=2, direct=True, boxed=True, by_columns=True)
BY_WARPS = Mxfp4Tile(8, 128, 2, 3, 3, row_units=2, warp_products=True, direct=True)


@on_host
@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize(
    ("tile", "form", "H", "I", "T", "together"),
    [
        (NARROW, Form(), 64, 32, 1, 1),
        (NARROW, GPT_OSS, 320, 96, 47, 4),
        (WIDE, Form(order="interleaved"), 160, 288, 70, 2),
        (replace(WIDE, groups=4, row_units=2), Form(bias=torch.float32), 416, 64, 33, 2),
        (replace(NARROW, max_n=16, row_stages=2, row_units=2), Form(), 416, 160, 47, 2),
        (replace(NARROW, max_n=64, row_stages=2, direct=True), GPT_OSS, 320, 96, 70, 2),
        (BY_WARPS, GPT_OSS, 320, 96, 21, 4),
        (replace(BY_WARPS, max_n=16), Form(), 416, 160, 47, 2),
        (replace(BY_WARPS, max_n=32, groups=1), Form(order="interleaved"), 96, 288, 47, 2),
        (replace(BY_WARPS, max_n=24, weight_rows=256, groups=4), Form(bias=torch.float32), 640, 320, 60, 2),
        (replace(NARROW, boxed=True), GPT_OSS, 320, 96, 47, 4),
        (replace(WIDE, boxed=True), Form(order="interleaved"), 160, 288, 70, 2),
        (replace(WIDE, groups=4, row_units=2, boxed=True), Form(bias=torch.float32), 416, 64, 33, 2),
        (replace(BY_WARPS, boxed=True), GPT_OSS, 320, 96, 21, 4),
        (replace(BY_WARPS, max_n=32, groups=1, boxed=True), Form(order="interleaved"), 96, 288, 47, 2),
        (replace(BY_WARPS, max_n=24, weight_rows=256, groups=4, boxed=True), Form(bias=torch.float32), 640, 320, 60, 2),
        (BY_COLUMNS, GPT_OSS, 320, 96, 47, 4),
        (replace(BY_COLUMNS, max_n=8, weight_rows=512, weight_stages=2, row_stages=2), Form(), 416, 160, 21, 2),
        (replace(BY_COLUMNS, max_n=48, groups=2, direct=False), Form(order="interleaved"), 96, 288, 70, 2),
        (replace(BY_COLUMNS, max_n=64), Form(bias=torch.float32), 640, 320, 90, 2),
    ],
    ids=str,
)
def test_products(
    tile: Mxfp4Tile,
    form: Form,
    H: int,
    I: int,
    T: int,
    together: int,
    late: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Units that are full and cut, tiles of one row, ragged and full; both orders; biases."""
    host = HostKernels(tmp_path, late, together=together)
    assert _worst_row(host, monkeypatch, tile, *_some_tokens(T, H, I, form)) < 8e-3


@on_host
@pytest.mark.parametrize(
    ("line", "instead", "late", "tile", "form"),
    [
        ("products_wait<1>();", "", True, NARROW, GPT_OSS),
        ("barrier_wait(shared.scales_full + 8 * turns.scales.at, turns.scales.parity);", "", True, NARROW, GPT_OSS),
        ("if (item.kind == DOWN) wait_for_tile(", "if (false) wait_for_tile(", False, NARROW, GPT_OSS),
        ("second ? weights : weights ^ 64", "weights", False, NARROW, GPT_OSS),
        ("(lane % 4 ^ row % 8) * 16", "lane % 4 * 16", False, NARROW, GPT_OSS),
        (", pitch - 1);", ", 1 << 20);", False, NARROW, GPT_OSS),
        ("(here ? g / 2 * RANGE : 0)", "(here ? g / 2 : g / 2) * RANGE", False, NARROW, GPT_OSS),
        ("at / 4 * UNIT + at % 4 * 8", "at / 4 * UNIT + at % 4 * 16", False, NARROW, GPT_OSS),
        ("word >> 6", "word >> 5", False, NARROW, GPT_OSS),
        ("any & 128", "any & 0", False, NARROW, LARGE),
        ("chunks[1].any()) & 128", "chunks[1].any()) & 0", False, BY_WARPS, LARGE),
        ("^ (lane % 8);", "^ 0;", False, BY_WARPS, GPT_OSS),
        ("weights ^ 64 * h", "weights", False, BY_WARPS, GPT_OSS),
        ("row + channel + 8,", "row + channel,", False, BY_WARPS, GPT_OSS),
        ("products_wait<0>();  // then the", "// then the", True, BY_COLUMNS, GPT_OSS),
        ("(chunks.any() & 128) != 0", "false", False, BY_COLUMNS, LARGE),
        (">= H : Box", ">= H - 128 : Box", False, BY_COLUMNS, GPT_OSS),
        ("h * 2 * HALF_BYTES / 16", "0", False, BY_COLUMNS, GPT_OSS),
        ("second << 2, 0x06030603u", "second << 2, 0x06010601u", False, replace(BY_WARPS, boxed=True), GPT_OSS),
        ("first + rows / 2 * n", "first + 32", False, replace(BY_WARPS, boxed=True), GPT_OSS),
        ("box % 2 * 32 * groups", "box % 2 * 128", False, replace(BY_WARPS, boxed=True), GPT_OSS),
    ],
)
def test_a_mistake_is_seen(
    line: str, instead: str, late: bool, tile: Mxfp4Tile, form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = HostKernels(tmp_path, late, with_mistake(tmp_path, "sm90/mxfp4_mlp", line, instead), together=4)
    ids, experts = _some_tokens(40, 320, 96, form)
    if form is LARGE:
        experts.tensors["gate_up_scales"][:2, 1::2] += 20
        experts.tensors["down_scales"][:2] -= 20
    assert not _worst_row(host, monkeypatch, tile, ids, experts) < 0.1


@on_host
def test_every_byte_and_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte in each place of a word, times each scale, is the bf16 that the format says, in the order that rows
    of activations have."""
    source = tmp_path / "decode.cu"
    source.write_text(_DECODE)
    host = HostKernels(tmp_path, sources={"decode": source})
    host.use(monkeypatch)
    bytes_ = (torch.arange(256)[:, None] + torch.tensor([0, 85, 171, 230])).remainder(256).to(torch.uint8)
    words, out = bytes_.contiguous(), torch.zeros(256, 256, 4, dtype=torch.int32)
    load.Launch(Spec.of("decode", "sm_90a"), 0, (1,), 256)(None, words.data_ptr(), out.data_ptr())
    assert host.sound
    got = out.view(BF16).view(256, 256, 4, 2)  # [word, scale, j, half]
    blocks = bytes_[:, None].expand(256, 256, 4).repeat(1, 1, 4)
    want = dequantise(blocks, torch.arange(256, dtype=torch.uint8).expand(256, 256)[..., None]).to(BF16)[..., :8]
    want = want.view(256, 256, 2, 4).transpose(2, 3)
    assert torch.equal(got.nan_to_num(7.5), want.nan_to_num(7.5)) and bool(got[:, 255].isnan().all())


_DECODE = """
#include "sm90/mxfp4.cuh"
extern "C" __global__ void decode(const u32* words, u32* out) {
    for (u32 scale = 0; scale < 256; ++scale) {
        u32* to = out + (threadIdx.x * 256 + scale) * 4;
        spread(words[threadIdx.x], to);
        for (int j = 0; j < 4; ++j) to[j] = multiply_pairs(multiply_pairs(to[j], factor(scale)), rest_of(scale));
    }
}
"""


@on_host
@pytest.mark.parametrize("H", [32, 96, 128, 160, 2880])
def test_order_of_channels(H: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Element by element, as sm90/mxfp4.cuh writes it; zeros behind the last channel."""
    HostKernels(tmp_path).use(monkeypatch)
    T, wide = 3, -(-H // 128) * 128
    hidden, out = torch.randn(T, H).to(BF16), torch.full((T, wide), 7.0, dtype=BF16)
    grid = (-(-T * wide // 8 // 256),)
    order = load.Launch(Spec.of("sm90/mxfp4_order", "sm_90a"), 0, grid, 256, c_int32(T), c_int32(H))
    order(None, hidden.data_ptr(), out.data_ptr())
    want = torch.zeros(T, wide, dtype=BF16)
    for channel in range(H):
        c, i, h, j = channel % 128 // 32, channel % 32 // 8, channel % 8 // 4, channel % 4
        want[:, channel // 128 * 128 + 16 * (2 * i + j // 2) + 8 * (j % 2) + 2 * c + h] = hidden[:, channel]
    assert torch.equal(out, want)


@on_host
def test_order_of_more_than_2_31_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last three rows of T * H = 2^34 elements, which lie alone in memory."""
    before, rows, H = 1 << 27, 3, 128
    later = with_mistake(
        tmp_path, "sm90/mxfp4_order", "blockIdx.x * blockDim.x", "(blockIdx.x + (1u << 23)) * blockDim.x"
    )
    hidden, out, want = torch.randn(rows, H).to(BF16), *(torch.full((rows, H), 7.0, dtype=BF16) for _ in range(2))

    def order(host: HostKernels, skipped: int, to: Tensor) -> None:
        host.use(monkeypatch)
        last = c_int32(skipped + rows), c_int32(H)
        launch = load.Launch(Spec.of("sm90/mxfp4_order", "sm_90a"), 0, (1,), 256, *last)
        launch(None, hidden.data_ptr() - 2 * H * skipped, to.data_ptr() - 2 * H * skipped)

    order(HostKernels(tmp_path), 0, want)
    order(HostKernels(tmp_path, sources=later), before, out)
    assert torch.equal(out, want) and not bool((out == 7).all())


def test_a_warp_reads_every_bank_once() -> None:
    """Lanes of a quarter of a warp, which load 16 bytes each at a time: `Place` of mxfp4_mlp.cu."""
    for down in (False, True):
        for warp in range(4):
            for quarter in range(4):
                chunks = set()
                for lane in range(8 * quarter, 8 * quarter + 8):
                    g = lane // 4
                    row = warp * 16 + g % 2 * 4 + g // 2 if down else g // 2 * 16 + g % 2 * 4 + warp
                    chunks.add((lane % 4) ^ (row % 8))
                assert len(chunks) == 8
