"""sm80/grouped_gemm.cu without a GPU: its source on the host, with fibers for threads and the PTX ISA's fragments.

Launched by the same host code as on a GPU. NaN in what was not written, copies that land as early or as late as they
may, and a source with one line changed show that a mistake does not pass.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from host_kernels import GXX, HostKernels
from torch import Tensor

from ttnn_moe import Experts, Routing
from ttnn_moe.cuda.launch import Selection
from ttnn_moe.cuda.native import launch
from ttnn_moe.cuda.native.arch import ARCHES
from ttnn_moe.cuda.native.plan import Sorted
from ttnn_moe.cuda.native.sm80_tiles import MmaGemm
from ttnn_moe.sources import kernel_path

NAME = "sm80/grouped_gemm"
pytestmark = pytest.mark.skipif(GXX is None, reason="g++ is not installed")


def _worst(
    kernels: HostKernels, monkeypatch: pytest.MonkeyPatch, gemm: MmaGemm, ids: Tensor, experts: Experts
) -> float:
    """Run both products of a call; the largest relative error of a row; infinite for NaN and where none may write."""
    kernels.use(monkeypatch)
    (T, K), E, H, I = ids.shape, experts.E, experts.H, experts.I
    gate_up, down = (experts.tensors[name] for name in ("gate_up", "down"))
    hidden = torch.randn(T, H).to(gate_up.dtype)
    plan = Sorted(gemm, 128, arch=ARCHES[8, 0])
    # with room for what a wrong kernel writes past the last row
    act, out = (torch.full((T * K + 8, width), 1e4, dtype=hidden.dtype) for width in (I, H))
    words = torch.full((launch.sort_words(T * K, E, plan),), -(2**31), dtype=torch.int32)
    selection = Selection.of(Routing.from_topk(ids, torch.ones(T, K), E))
    launch.run(hidden, selection, experts, torch.empty(T, H), False, plan, act, out, words)
    expert = ids.flatten()[(ids.flatten() >= 0) & (ids.flatten() < E)].sort().values.long()
    n = len(expert)
    if not (kernels.sound and bool((act[n:] == 1e4).all() and (out[n:] == 1e4).all())):
        return float("inf")
    x = hidden[words[:n].long()].double()
    both = torch.einsum("rh,rih->ri", x, gate_up.double()[expert])
    gate, up = (both[:, 0::2], both[:, 1::2]) if experts.gate_up_order == "interleaved" else both.chunk(2, 1)
    errors = []
    for got, want in (
        (act, torch.nn.functional.silu(gate) * up),
        (out, torch.einsum("ri,rhi->rh", act[:n].double(), down.double()[expert])),
    ):
        errors.append((got[:n].double() - want).norm(dim=1) / want.norm(dim=1))
    return float(torch.cat(errors).nan_to_num(nan=float("inf")).max())


def _experts(E: int, H: int, I: int, dtype: torch.dtype, order: str = "halves") -> Experts:
    gate_up, down = torch.randn(E, 2 * I, H) * H**-0.5, torch.randn(E, H, I) * I**-0.5
    return Experts.dense(gate_up.to(dtype), down.to(dtype), gate_up_order=order)


BF16, F16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize(
    ("gemm", "dtype", "order", "H", "I", "T"),
    [
        (MmaGemm(32, 4), BF16, "halves", 64, 64, 1),
        (MmaGemm(32, 4), BF16, "interleaved", 320, 64, 47),
        (MmaGemm(64, 3), F16, "halves", 128, 192, 70),
        (MmaGemm(64, 4), BF16, "interleaved", 64, 320, 33),
        (MmaGemm(128, 4), F16, "halves", 384, 128, 9),
        (MmaGemm(128, 3), BF16, "halves", 64, 64, 260),
    ],
    ids=str,
)
def test_products(
    gemm: MmaGemm, dtype: torch.dtype, order: str, H: int, I: int, T: int, late: bool,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Tiles that are full, ragged, of one row; an expert with no token, whose weights are NaN; ids of no expert."""
    E, K = 4, 2
    ids = torch.randint(0, 2, (T, K), dtype=torch.int32)
    ids[::7, 0], ids[T // 2, 1] = 3, -1
    experts = _experts(E, H, I, dtype, order)
    for tensor in experts.tensors.values():
        tensor[2] = float("nan")
    bound = 4e-3 if dtype == BF16 else 1e-3
    assert _worst(HostKernels(tmp_path, late), monkeypatch, gemm, ids, experts) < bound


def test_no_row_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = HostKernels(tmp_path, late=True)
    kernels.use(monkeypatch)
    plan, experts = Sorted(MmaGemm(32, 4), 128, arch=ARCHES[8, 0]), _experts(2, 64, 64, BF16)
    hidden, act, out = (torch.full((3, 64), 7.0, dtype=BF16) for _ in range(3))
    words = torch.zeros(launch.sort_words(3, 2, plan), dtype=torch.int32)
    ids = torch.full((3, 1), -1, dtype=torch.int32)
    selection = Selection.of(Routing.from_topk(ids, torch.ones(3, 1), 2))
    launch.run(hidden, selection, experts, torch.empty(3, 64, dtype=BF16), False, plan, act, out, words)
    assert kernels.sound and bool((act == 7).all() and (out == 7).all())


@pytest.mark.parametrize(
    ("line", "instead", "late"),
    [
        ("copies_wait<STAGES - 2>();", "copies_wait<STAGES - 1>();", True),
        ("__syncthreads();  // this stage", "// this stage", True),
        ("__syncthreads();  // this stage", "// this stage", False),
        ("const int next = step + STAGES - 1;", "const int next = step + STAGES - 2;", True),
        ("__syncthreads();  // the next tile", "// the next tile", False),
        ("const int row = tile.first + min(", "const int row = min(", True),
        ("(chunk ^ (row % 8)) * 16", "(chunk ^ (row % 4)) * 8", True),
        ("row < tile.rows && channel", "channel", True),
        ("rows + place(group * 8 + lane % 8", "rows + place(group * 8 + lane / 4", True),
    ],
)
def test_a_mistake_is_seen(
    line: str, instead: str, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    source = kernel_path("gpu_kernels", "cuda", f"{NAME}.cu").read_text()
    assert line in source
    wrong = tmp_path / "wrong.cu"
    wrong.write_text(source.replace(line, instead))
    ids = torch.randint(0, 3, (50, 2), dtype=torch.int32)
    experts = _experts(3, 320, 64, BF16)
    kernels = HostKernels(tmp_path, late, {NAME: wrong})
    assert _worst(kernels, monkeypatch, MmaGemm(32, 4), ids, experts) > 0.1
