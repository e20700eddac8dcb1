"""Kernels that write packed tiers give the bits of their definition: the sources on the host, or on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bucketed_writes import Written, changes, written
from host_kernels import GXX, HostKernels, used, with_mistake
from ttnn_moe.choice import plain
from ttnn_moe.cuda.attention import bucketed_write
from ttnn_moe.decoder.torch_forms import head_norm_rope
from ttnn_moe.kv.bucketed import moves, writes
from ttnn_moe.kv.cache import HeadNorms
from ttnn_moe.kv.step import DecodeStep

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
pytestmark = [pytest.mark.skipif(not GPU and GXX is None, reason="g++ is not installed"), *[pytest.mark.gpu] * GPU]
KEPT = bucketed_write._writer, bucketed_write._mover, bucketed_write._stayer


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostKernels:
    """Where there is no GPU, the kernels run on the host."""
    return used(HostKernels(tmp_path), monkeypatch, *KEPT)


def moved(high: int, bits: list[int], layers: int, kv_heads: int, n: int) -> bool:
    """Whether the kernels' move has the bits of its definition."""
    pair = [written(high, bits, layers, kv_heads, n, DEVICE) for _ in range(2)]
    for run, one in zip((bucketed_write.move, moves.move), pair, strict=True):
        run(one.tiers[high], list(one.tiers.values()), one.rings[0], changes(bits, n, DEVICE), one.staged)
    return same(*pair)


def same(one: Written, two: Written) -> bool:
    """Equal bits; but any NaN of bf16 equals any other."""
    return all(
        torch.equal(*(torch.nan_to_num(x.float(), 77.0) for x in both))
        for both in zip(one.tensors(), two.tensors(), strict=True)
    )


@pytest.mark.slow(8)
@pytest.mark.parametrize(
    ("high", "bits", "layers", "kv_heads", "n"),
    [(8, [2, 3], 1, 1, 70), (16, [8, 4], 2, 1, 20), *([(8, [3, 4, 2], 3, 4, 900), (8, [8], 2, 2, 200)] if GPU else [])],
)
def test_units_and_what_stays(
    host: HostKernels, high: int, bits: list[int], layers: int, kv_heads: int, n: int
) -> None:
    assert moved(high, bits, layers, kv_heads, n) and host.sound


@pytest.mark.parametrize("high", [8, 16])
@pytest.mark.parametrize("bound", [None, 2])
def test_a_token_a_row(host: HostKernels, high: int, bound: int | None) -> None:
    count = None if bound is None else torch.tensor(bound, dtype=torch.int32, device=DEVICE)
    rows, at = torch.tensor([1, 0, 1], device=DEVICE), torch.tensor([700, 2, 95], device=DEVICE)
    pair = [written(high, [3], 2, 2, 9, DEVICE) for _ in range(2)]
    for layer in range(2):
        for kernel, one in zip((True, False), pair, strict=True):
            k, v, ring = one.staged.k[layer, :3], one.staged.v[layer, :3], one.rings[layer]
            if kernel:
                bucketed_write.put(k, v, ring, rows, at, count)
            else:
                with plain():
                    writes.put(k[:bound], v[:bound], ring, DecodeStep(rows[:bound], at[:bound], 1000))
    assert same(*pair) and host.sound


def test_norm_and_rope_of_heads(host: HostKernels) -> None:
    """One token is so small that eps changes it; one is zero."""
    T, heads, kv_heads = 3, 4, 2
    one, two = (written(8, [3], 1, kv_heads, T, DEVICE) for _ in range(2))
    qkv, angles = torch.randn(T, heads + 2 * kv_heads, 128).to(DEVICE).bfloat16(), 7 * torch.rand(T, 1, 64)
    qkv[1] *= 1e-3
    qkv[2] = 0
    norms = HeadNorms(*(0.5 + torch.rand(2, 128)).to(DEVICE).bfloat16(), 1e-6)
    rope = angles.cos().to(DEVICE).bfloat16(), angles.sin().to(DEVICE).bfloat16()
    step = DecodeStep(torch.tensor([1, 0, 1], device=DEVICE), torch.tensor([1, 50, 3], device=DEVICE), 1000)
    places = step.rows, step.positions, None
    got = bucketed_write.launch(qkv, norms.q, norms.k, norms.eps, rope, one.rings[0], *places)
    want, k, v = head_norm_rope(qkv, kv_heads, norms, rope)
    with plain():
        writes.put(k, v, two.rings[0], step)
    torch.testing.assert_close(got.float(), want.float(), rtol=0.02, atol=0.02)
    pages = torch.arange(1, 7, device=DEVICE)
    for x, y in zip(*(moves.read_high(w.tiers[8], range(1), pages) for w in (one, two)), strict=True):
        assert float((x - y).norm(dim=-1).amax()) < 0.02 * float(y.norm(dim=-1).amax())
    assert torch.equal(one.tiers[8].together.token_ids, two.tiers[8].together.token_ids) and host.sound


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("out |= (pair(group + 15) >> of & 0x00010001u) << 15;", ""),
        ("if (!(most < __int_as_float(0x7f800000))) best = __int_as_float(0x7fc00000);", ""),
        ("flag = 0xbc00;  // -1", "flag = 0;"),
        ("sinks + (position - sinks) % ring;", "position;"),
    ],
    ids=["the last pair", "infinity", "what left", "the ring"],
)
@pytest.mark.skipif(GPU, reason="on the host alone")
def test_a_mistake_does_not_pass(line: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = with_mistake(tmp_path, "sm80/bucketed_units", line, instead)
    used(HostKernels(tmp_path, sources=wrong), monkeypatch, *KEPT)
    assert not moved(8, [3], 1, 1, 92)
