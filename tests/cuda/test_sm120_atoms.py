"""Fragments and scales of block-scaled products as the PTX ISA draws them, element by element, on the host.

What is compared are sm120/software_atoms.cuh, which stand in for the instructions in every other test.

| what | where the layout is from |
|---|---|
| A, B, C of m16n8k32 and m16n8k64 | PTX ISA 9.x, "Matrix Fragments for mma.m16n8k32" and ".m16n8k64" |
| ldmatrix m8n16 .b8x16.b4x16_p64 | PTX ISA 9.x, "ldmatrix"; CUTLASS shifts its bytes left by two bits for e2m1 |
| lanes that bring scales | CUTLASS's SM120 block-scaled traits (SFALayout, SFBLayout), and Triton's scale layout |
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from host_kernels import GXX, HERE, HostKernels, with_mistake
from ttnn_moe.cuda.jit import load
from ttnn_moe.cuda.jit.spec import Spec

pytestmark = pytest.mark.skipif(GXX is None, reason="g++ is not installed")
PROBE, LOAD = "sm120/atoms_probe", 16
SOURCE = HERE / "sm120" / "atoms_probe.cu"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    return HostKernels(tmp_path_factory.mktemp("atoms"), sources={PROBE: SOURCE})


@pytest.fixture
def kernels(built: HostKernels, monkeypatch: pytest.MonkeyPatch) -> HostKernels:
    built.use(monkeypatch)
    return built


def run_probe(atom: int, words: Tensor, out: Tensor, rows: Tensor | None = None) -> Tensor:
    """words [B, 32, 8], rows [B, 32] of any integers -> out [B, 32, 4], added to or written."""
    spec = Spec.of(PROBE, "sm_120f", SOFTWARE_ATOMS=1)
    launch = load.Launch(spec, 0, (len(words),), 32, ctypes.c_int32(atom), shared_memory=1024)
    given = [(words if t is None else t).to(torch.int64).to(torch.int32).contiguous() for t in (words, rows)]
    launch(None, *(tensor.data_ptr() for tensor in given), out.data_ptr())
    return out


def place_a(row: int, k: int, per_word: int) -> tuple[int, int, int]:
    """Lane, word and place in the word of an element of A: the PTX ISA's formulas, solved for the thread and i."""
    group, i_high = row % 8, row // 8  # groupID and groupID + 8
    half, within = divmod(k, 4 * per_word)
    thread, i = divmod(within, per_word)
    return 4 * group + thread, i_high + 2 * half, i


def place_b(k: int, column: int, per_word: int) -> tuple[int, int, int]:
    half, within = divmod(k, 4 * per_word)
    thread, i = divmod(within, per_word)
    return 4 * column + thread, half, i


def place_c(row: int, column: int) -> tuple[int, int]:
    return 4 * (row % 8) + column // 2, row // 8 * 2 + column % 2


def e4m3(codes: Tensor) -> Tensor:
    return codes.to(torch.uint8).view(torch.float8_e4m3fn).double()


def fragments(atom: int, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """Words [32, 8] of codes a [16, K] and b [K, 8], scales [16, G] and [8, G]; what nobody reads is a NaN scale."""
    packed, bits = atom >= 8, 4 if atom >= 8 else 8
    per_word, words = 32 // bits, torch.zeros(32, 8, dtype=torch.int64)
    fp4_a = atom // 4 == 1
    for row in range(16):
        for k in range(a.shape[1]):
            lane, word, i = place_a(row, k, per_word)
            words[lane, word] |= int(a[row, k]) << (bits * i + (2 if fp4_a and not packed else 0))
    for k in range(b.shape[0]):
        for column in range(8):
            lane, word, i = place_b(k, column, per_word)
            words[lane, 4 + word] |= int(b[k, column]) << (bits * i + (0 if fp4_a or packed else 2))
    byte = atom % 4
    words[:, 6:] = 0xFFFFFFFF
    for at, scales, lanes in (
        (6, scale_a, [4 * (row % 8) + row // 8 for row in range(16)]),
        (7, scale_b, [4 * column for column in range(8)]),
    ):
        for i, lane in enumerate(lanes):
            for group in range(scales.shape[1]):
                shift = 8 * (byte + group)
                words[lane, at] = (words[lane, at] & ~(0xFF << shift)) | int(scales[i, group]) << shift
    return words


def drawn(atom: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    k, groups = (64, 2) if atom >= 8 else (32, 1)
    fp8 = torch.randint(0, 0x7F, (16, k), generator=g) | torch.randint(0, 2, (16, k), generator=g) << 7
    fp4 = torch.randint(0, 16, (16, k), generator=g)
    a, b = (fp4, torch.randint(0, 16, (k, 8), generator=g)) if atom >= 8 else (fp8, fp4[:8].T)
    if atom // 4 == 1:
        a, b = fp4, fp8[:8].T
    scales = [torch.randint(100, 140, (n, groups), generator=g) for n in (16, 8)]
    return a, b, scales[0], scales[1]


def values(atom: int, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    if atom >= 8:
        return E2M1[a], E2M1[b]
    return (E2M1[a], e4m3(b)) if atom // 4 == 1 else (e4m3(a), E2M1[b])


def product(atom: int, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    of_a, of_b = values(atom, a, b)
    of_a = of_a * 2.0 ** (scale_a.double() - 127).repeat_interleave(32, 1)
    return of_a @ (of_b * 2.0 ** (scale_b.double() - 127).repeat_interleave(32, 1).T)


def matrix(sums: Tensor) -> Tensor:
    """[B, 32, 4] -> [B, 16, 8]."""
    places = [place_c(row, column) for row in range(16) for column in range(8)]
    return torch.stack([sums[:, lane, i] for lane, i in places], 1).view(-1, 16, 8)


@pytest.mark.parametrize("atom", [0, 1, 2, 3, 4, 5, 6, 7, 8, 10])
def test_a_product_of_any_numbers(atom: int, kernels: HostKernels) -> None:
    drawings = [drawn(atom, seed) for seed in range(4)]
    start = torch.randn(4, 32, 4)
    got = matrix(run_probe(atom, torch.stack([fragments(atom, *one) for one in drawings]), start.clone()))
    want = matrix(start).double() + torch.stack([product(atom, *one) for one in drawings])
    assert kernels.sound
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("atom", [0, 4, 8])
def test_every_element_of_both_operands(atom: int, kernels: HostKernels) -> None:
    """One element of A is 1, or one of B: the row, or column, of the other that it multiplies comes out."""
    a, b, scale_a, scale_b = drawn(atom)
    scale_a, scale_b = torch.full_like(scale_a, 127), torch.full_like(scale_b, 127)
    one = [2 if atom >= 8 else 0x38, 2]
    of_a, of_b = (one[1], one[0]) if atom // 4 == 1 else (one[0], one[1])
    K, words, want = a.shape[1], [], []
    value_a, value_b = values(atom, a, b)
    base_a, base_b = (fragments(atom, x, y, scale_a, scale_b) for x, y in ((a * 0, b), (a, b * 0)))
    bits = 4 if atom >= 8 else 8
    shift_a, shift_b = (2, 0) if atom // 4 == 1 else (0, 0) if atom >= 8 else (0, 2)
    for row in range(16):
        for k in range(K):
            lane, word, i = place_a(row, k, 32 // bits)
            words.append(base_a.clone())
            words[-1][lane, word] |= of_a << (bits * i + shift_a)
            want.append(torch.zeros(16, 8, dtype=torch.float64))
            want[-1][row] = value_b[k]
    for k in range(K):
        for column in range(8):
            lane, word, i = place_b(k, column, 32 // bits)
            words.append(base_b.clone())
            words[-1][lane, 4 + word] |= of_b << (bits * i + shift_b)
            want.append(torch.zeros(16, 8, dtype=torch.float64))
            want[-1][:, column] = value_a[:, k]
    got = matrix(run_probe(atom, torch.stack(words), torch.zeros(len(words), 32, 4)))
    assert kernels.sound and torch.equal(got.double(), torch.stack(want))


@pytest.mark.parametrize("atom", [0, 7, 10])
def test_every_scale(atom: int, kernels: HostKernels) -> None:
    """A scale that is NaN spoils its row or column, and no other; a group of them alone counts in packed products."""
    a, b, scale_a, scale_b = drawn(atom)
    words, want = [], []
    for side, scales in enumerate((scale_a, scale_b)):
        for i in range(len(scales)):
            for group in range(scales.shape[1]):
                spoiled = [scale_a.clone(), scale_b.clone()]
                spoiled[side][i, group] = 0xFF
                words.append(fragments(atom, a, b, spoiled[0], spoiled[1]))
                want.append(torch.zeros(16, 8, dtype=torch.bool))
                want[-1][(i,) if side == 0 else (slice(None), i)] = True
    got = matrix(run_probe(atom, torch.stack(words), torch.zeros(len(words), 32, 4)))
    assert kernels.sound and torch.equal(got.isnan(), torch.stack(want))


def test_bits_beside_an_fp4_number_are_seen(kernels: HostKernels) -> None:
    """What ldmatrix gives and nobody shifted, as a product of any numbers."""
    a, b, scale_a, scale_b = drawn(0)
    words = fragments(0, a, b, scale_a, scale_b)
    words[:, 4:6] >>= 2
    assert bool(run_probe(0, words[None], torch.zeros(1, 32, 4)).isnan().all())


def padded_rows(g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Codes [64, 16] and the rows of them: 8 bytes of two codes each, the first in the low bits, and 8 of padding."""
    codes = torch.randint(0, 16, (64, 16), generator=g)
    return codes, torch.cat([codes[:, 0::2] | codes[:, 1::2] << 4, torch.full((64, 8), 0xFF)], 1)


def load_words(rows: Tensor, data: Tensor) -> Tensor:
    """[32, 4] words of bytes of data, 1 KiB, whose 16-byte rows `rows` the lanes name."""
    words = (data.view(1, 32, 8, 4) << torch.tensor([0, 8, 16, 24])).sum(3)
    return run_probe(LOAD, words, torch.zeros(1, 32, 4, dtype=torch.int32), 16 * rows[None])[0]


def test_a_load_of_padded_fp4(kernels: HostKernels) -> None:
    g = torch.Generator().manual_seed(0)
    codes, data = padded_rows(g)
    rows = torch.randperm(64, generator=g)[:32]  # a lane names any row
    got = load_words(rows, data)
    for lane in range(32):
        for m in range(4):
            four = codes[rows[8 * m + lane // 4], lane % 4 * 4 : lane % 4 * 4 + 4].tolist()
            assert [int(got[lane, m]) >> 8 * i & 0xFF for i in range(4)] == four
    assert kernels.sound


MISTAKES = {
    "row_scale": ("lanes.of(row * 4 + i / 2, 6) >> 8 * byte & 0xff", "lanes.of(row * 4, 6) >> 8 * byte & 0xff"),
    "byte": ("lanes.of(column * 4, 7) >> 8 * byte & 0xff", "lanes.of(column * 4, 7) & 0xff"),
    "row": ("lanes.of(row * 4 + n % 4, i / 2 + n / 4 * 2)", "lanes.of(row * 4 + n % 4, i / 2 * 2 + n / 4)"),
    "nibbles": ("(four & 0xf) | (four & 0xf0) << 4", "(four & 0xf0) >> 4 | (four & 0xf) << 8"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = HostKernels(tmp_path, sources=with_mistake(tmp_path, PROBE, *MISTAKES[mistake], SOURCE))
    wrong.use(monkeypatch)
    one = drawn(1)
    got = matrix(run_probe(1, fragments(1, *one)[None], torch.zeros(1, 32, 4))).double()
    codes, data = padded_rows(torch.Generator().manual_seed(0))
    loaded = load_words(torch.arange(32), data)
    right = int(loaded[0, 0]) & 0xFF == int(codes[0, 0])
    assert not (right and torch.allclose(got, product(1, *one)[None], rtol=1e-6))
