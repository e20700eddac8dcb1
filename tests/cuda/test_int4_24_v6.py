"""v6 of int4_24 without a GPU: its kernels on the host, through the same launches as on a GPU.

Each pinned invariant of the contract is a test here or a static_assert that a test breaks.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from ctypes import c_int32
from pathlib import Path

import pytest
import torch
from torch import Tensor

from assertions import assert_close
from host_kernels import GXX, HostKernels, with_mistake
from int4_24_cases import exact_activations, exact_experts, integers, product, random_int4_24
from ttnn_moe import Experts
from ttnn_moe.backend import Numerics
from ttnn_moe.cuda.jit import load
from ttnn_moe.cuda.jit.spec import Spec
from ttnn_moe.cuda.moe import int4_24_v6_steps
from ttnn_moe.cuda.moe.int4_24_v6 import FOLDER
from ttnn_moe.cuda.moe.int4_24_v6_steps import FusedMoE
from ttnn_moe.errors import ContractError, GradientsRefused
from ttnn_moe.selfcheck.oracle import oracle

why_not_on = int4_24_v6_steps.why_not_on
on_host = pytest.mark.skipif(GXX is None, reason="g++ is not installed")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _words_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int4_24_v6_steps, "why_not_on", lambda device: None)


def _ids(T: int, K: int, E: int) -> Tensor:
    """Experts 0, 1 and the last of E; -1 and an id out of range; a token that names one expert twice."""
    ids = torch.tensor([0, 1, E - 1])[torch.randint(0, 3, (T, K))].int()
    ids[T // 2, 0], ids[T // 3, 0] = -1, E
    ids[0] = 1
    return ids


def _expected_rows(hidden: Tensor, ids: Tensor, E: int) -> tuple[Tensor, Tensor]:
    """Offsets [E + 1], tokens of the sorted rows."""
    flat = ids.flatten()
    order = torch.cat([(flat == e).nonzero()[:, 0] for e in range(E)])
    offsets = torch.tensor([0, *(int((flat == e).sum()) for e in range(E))]).cumsum(0)
    return offsets, order // ids.shape[1]


def _worst(kernels: HostKernels, experts: Experts, T: int, K: int, eids: bool = True) -> float:
    """Run permute, K2 and K4 on small integers; 0 where every bit is right, else infinity."""
    E, H, I = experts.E, experts.H, experts.I
    hidden, ids = integers(T, H), _ids(T, K, E)
    flow = FusedMoE(experts, T, K)
    sorted_rows = flow.permute(hidden, ids)
    offsets, tokens = _expected_rows(hidden, ids, E)
    n = len(tokens)
    assert torch.equal(sorted_rows.OffE.long(), offsets) and torch.equal(sorted_rows.X_perm[:n], hidden[tokens])
    chosen = sorted_rows.Eids if eids else None
    # small integers again, since the product of what K2 makes would not be exact
    act = flow.k2(sorted_rows.X_perm, sorted_rows.OffE, chosen)
    X2 = integers(T * K, I)
    rows = flow.k4(X2, sorted_rows.OffE, chosen)
    right = kernels.sound
    for e in range(E):
        at = slice(int(offsets[e]), int(offsets[e + 1]))
        right &= torch.equal(act[at], exact_activations(experts, e, sorted_rows.X_perm[at]))
        right &= torch.equal(rows[at], product(experts.tensors["w2"][e], X2[at]).bfloat16())
    return 0.0 if right else float("inf")


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostKernels:
    torch.manual_seed(0)
    found = HostKernels(tmp_path)
    found.use(monkeypatch)
    return found


@on_host
@pytest.mark.parametrize(
    ("H", "I", "T", "K", "order", "odd", "eids"),
    [
        (64, 64, 1, 1, "halves", False, True),
        (128, 192, 11, 3, "interleaved", False, False),
        (192, 128, 9, 2, "halves", True, True),
        (320, 64, 20, 2, "halves", True, False),
    ],
)
def test_bits_are_those_of_the_integer_model(
    H: int, I: int, T: int, K: int, order: str, odd: bool, eids: bool, kernels: HostKernels
) -> None:
    """With odd scales too: they are applied after the product, in fp32. A scale in A would round to bf16."""
    assert _worst(kernels, exact_experts(4, H, I, order, odd), T, K, eids) == 0


@on_host
@pytest.mark.parametrize("order", ["halves", "interleaved"])
def test_the_layer_is_within_the_bound_of_the_oracle(order: str, kernels: HostKernels) -> None:
    T, K, E, H, I = 13, 2, 5, 128, 192
    experts, hidden, ids, ws = (
        random_int4_24(E, H, I, order),
        torch.randn(T, H).bfloat16(),
        _ids(T, K, E),
        torch.rand(T, K),
    )
    flow = FusedMoE(experts, T, K)
    out = flow.apply(hidden, ids, ws)
    want = oracle(hidden, ids, ws, experts, Numerics(activation=BF16, expert_out=BF16))
    assert kernels.sound
    assert_close(out, want, BF16, "v6")
    parts = flow.permute(hidden, ids)
    rows = flow.k4(flow.k2(parts.X_perm, parts.OffE, parts.Eids), parts.OffE, parts.Eids)
    assert torch.equal(out, flow.combine(rows, parts.Inv, ws))
    assert torch.equal(parts.Eids, torch.tensor([0, 1, E - 1, -1, -1], dtype=torch.int32))


@on_host
def test_no_expert_has_a_token(kernels: HostKernels) -> None:
    experts = exact_experts(3, 64, 64)
    flow = FusedMoE(experts, 2, 2)
    ids = torch.full((2, 2), -1, dtype=torch.int32)
    parts = flow.permute(integers(2, 64), ids)
    assert parts.OffE.tolist() == [0] * 4 and parts.Eids.tolist() == [-1] * 3 and parts.Inv.tolist() == [[-1, -1]] * 2
    assert not flow.apply(integers(2, 64), ids, torch.ones(2, 2)).any()
    assert kernels.traces[f"{FOLDER}/k2_w13"] == "", "an expert with no token costs one early exit"


PRELOAD = """
#include "sm80/int4_24_v6/preload.cuh"

extern "C" __global__ void fill(const u16* X, u16* out, int DIM, int m_base, int m_end) {
    preload(dynamic_memory(), X, DIM, m_base, m_end);
    __syncthreads();
    for (int i = threadIdx.x; i < DIM * NTOK; i += TB) out[i] = reinterpret_cast<u16*>(dynamic_memory())[i];
}
"""


@on_host
@pytest.mark.parametrize(("DIM", "m_base", "m_end"), [(64, 0, 8), (320, 8, 30), (192, 5, 6)])
def test_monolith_b_is_row_major_by_k_and_zero_past_m_end(
    DIM: int, m_base: int, m_end: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Xsh [DIM][8] bf16, contiguous in tok."""
    source = tmp_path / "fill.cu"
    source.write_text(PRELOAD)
    kernels = HostKernels(tmp_path, sources={"fill": source})
    kernels.use(monkeypatch)
    X, out = torch.randn(40, DIM).bfloat16(), torch.empty(DIM, 8, dtype=BF16)
    last = (c_int32(value) for value in (DIM, m_base, m_end))
    load.Launch(Spec.of("fill", "sm_80"), 0, (1,), 128, *last, shared_memory=DIM * 16)(
        None, X.data_ptr(), out.data_ptr()
    )
    want = torch.zeros(DIM, 8, dtype=BF16)
    n = min(m_end - m_base, 8)
    want[:, :n] = X[m_base : m_base + n].T
    assert kernels.sound and torch.equal(out, want)


def _cadence(paths: int, G2: int) -> str:
    """What a lane does for one tile and one phase, as letters of the emulator: s, x shuffles; B ldmatrix; 0, 1 mma.

    Each half's ldmatrix comes before its products, and behind the products of the half before.
    """
    stage, park = "s" * 8 * paths, "xx" * paths
    return stage + park + park + "B" + ("0" * paths + "B" + stage + park + "1" * paths + "B" + park) * G2


@on_host
@pytest.mark.parametrize(("kernel", "paths"), [("k2_w13", 2), ("k4_w2", 1)])
def test_p1_stage_exec_ping_pong(kernel: str, paths: int, kernels: HostKernels) -> None:
    """stage(next) within half 0 of cur, park(next) in its windows; one barrier, after the preload; two phases.

    Of each half's metadata the other pair of lanes holds none: the trace would have a "!".
    """
    H, I = 192, 128
    flow = FusedMoE(exact_experts(2, H, I), 3, 1)
    flow.apply(integers(3, H), torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1))
    tiles = {"k2_w13": [H // 64] * 2, "k4_w2": [I // 64] * 2 + [I // 64]}[kernel]
    phases = [_cadence(paths, G2) for G2 in tiles]
    want = "|" + "".join(phases) if kernel == "k2_w13" else "|" + phases[0] + phases[1] + "|" + phases[2]
    assert kernels.sound and kernels.traces[f"{FOLDER}/{kernel}"] == want


MISTAKES = {
    "128 rows via 2x64 phases": ("phase * PHASE_ROWS", "0"),
    "Xsh is row-major by k, contiguous in tok": ("odd ? 0x7632 : 0x5410", "odd ? 0x5410 : 0x7632"),
    "ldmatrix.x4.trans over four stacked blocks in k": ("Xsh + at.lane * KROW_BYTES", "Xsh + at.group * KROW_BYTES"),
    "half 1 begins 32 channels on": ("slab + KTILE * KROW_BYTES", "slab"),
    "AS: scale_top for d0 d1, scale_bot for d2 d3": ("i < 2 ? scale_top : scale_bot", "i < 2 ? scale_bot : scale_top"),
    "lane mapping: rows": ("(i >= 2 ? 8 : 0)", "(i & 1 ? 8 : 0)"),
    "lane mapping: tokens": ("2 * t + (i & 1)", "t + (i & 1) * 4"),
    "selector split": ("at.t >> 1 == HALF ? e : 0", "at.t >> 1 != HALF ? e : 0"),
    "e: top in the low half, bot in the high half": ("(bytes & 0xffff0f0fu)", "(bytes >> 16)"),
    "e: t0 holds chunks 0-3, t1 chunks 4-7": ("at.t & 1 ? 0x4415 : 0x4440", "at.t & 1 ? 0x4440 : 0x4415"),
    "phantom pair: the slot": ("0x6240 - 0x3c", "0x6240 - 0"),
    "signed int4: q4 - 8": ("0x00f800f8u", "0x00f700f7u"),
    "broadcast of row_bot": ("SRC_T + 1;", "SRC_T;"),
    "up rows": ("{gate + up_rows}", "{gate}"),
}


@on_host
@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_seen(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    line, instead = MISTAKES[what]
    name = f"{FOLDER}/k2_w13"
    kernels = HostKernels(tmp_path, sources=with_mistake(tmp_path, name, line, instead))
    kernels.use(monkeypatch)
    assert _worst(kernels, exact_experts(3, 128, 128), 5, 2) > 0


PINS = [
    ("CTA=128, NWARP=4, NTOK=8, KTILE=32", "TB = 128", "TB = 256"),
    ("CTA=128, NWARP=4, NTOK=8, KTILE=32", "NTOK = 8", "NTOK = 16"),
    ("CTA=128, NWARP=4, NTOK=8, KTILE=32", "KTILE = 32", "KTILE = 16"),
    ("OTILE_CTA=128 via 2x64 phases", "PHASES = 2", "PHASES = 1"),
    ("OTILE_CTA=128 via 2x64 phases", "PHASE_ROWS = 16 * NWARP", "PHASE_ROWS = 32"),
    ("IDX_01=0x4, IDX_23=0xE", "IDX_01 = 0x4", "IDX_01 = 0x8"),
    ("IDX_01=0x4, IDX_23=0xE", "IDX_23 = 0xE", "IDX_23 = 0xD"),
]


@on_host
@pytest.mark.parametrize(("message", "line", "instead"), PINS)
def test_a_pin_is_static(
    message: str, line: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    kernels = HostKernels(tmp_path, sources=with_mistake(tmp_path, f"{FOLDER}/k2_w13", line, instead))
    kernels.use(monkeypatch)
    with pytest.raises(AssertionError, match=re.escape(message)):
        _worst(kernels, exact_experts(3, 64, 64), 1, 1)


@on_host
def test_wrong_arguments_are_refused(kernels: HostKernels) -> None:
    flow = FusedMoE(exact_experts(2, 64, 64), 2, 1)
    ids, ws = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
    for hidden, given, weights in (
        (integers(3, 64), ids, ws),
        (integers(2, 64).float(), ids, ws),
        (integers(4, 64)[::2], ids, ws),
        (integers(2, 64), ids.long(), ws),
        (integers(2, 64), ids, ws.bfloat16()),
    ):
        with pytest.raises(ContractError, match="expected"):
            flow.apply(hidden, given, weights)


@on_host
def test_what_is_no_such_tensor_is_refused(kernels: HostKernels) -> None:
    flow = FusedMoE(exact_experts(2, 64, 64), 2, 1)
    x, ids, ws = integers(2, 64), torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
    offsets, rows = torch.zeros(3, dtype=torch.int32), integers(2, 64)
    calls: list[Callable[[], object]] = [
        lambda: flow.apply(None, ids, ws),  # type: ignore[arg-type]
        lambda: flow.apply(x, ids.tolist(), ws),  # type: ignore[arg-type]
        lambda: flow.apply(x.float().numpy(), ids, ws),  # type: ignore[arg-type]
        lambda: flow.apply(torch._neg_view(x), ids, ws),
        lambda: flow.apply(x.to_sparse(), ids, ws),
        lambda: flow.permute(x, None),  # type: ignore[arg-type]
        lambda: flow.k2(None, offsets),  # type: ignore[arg-type]
        lambda: flow.k2(rows, None),  # type: ignore[arg-type]
        lambda: flow.k4(rows, offsets, torch.zeros(7)),
        lambda: flow.combine(None, ids, ws),  # type: ignore[arg-type]
        lambda: FusedMoE(exact_experts(2, 64, 64), 4.0, 1),  # type: ignore[arg-type]
        lambda: FusedMoE(exact_experts(2, 64, 64), 4, "1"),  # type: ignore[arg-type]
    ]
    for call in calls:
        with pytest.raises(ContractError, match="expected"):
            call()


@on_host
def test_gradients_are_refused(kernels: HostKernels) -> None:
    flow = FusedMoE(exact_experts(2, 64, 64), 2, 1)
    x, ids, ws = integers(2, 64), torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
    y = x.clone().requires_grad_()
    for out in (flow.apply(y, ids, ws) + y, flow.permute(y, ids).X_perm):
        with pytest.raises(GradientsRefused):
            out.sum().backward()
    with pytest.raises(GradientsRefused):
        torch.func.jvp(lambda z: flow.apply(z, ids, ws), (x,), (x,))
    assert y.grad is None


def test_no_tokens_are_refused(kernels: HostKernels) -> None:
    with pytest.raises(ContractError, match="no launch for T=0"):
        FusedMoE(exact_experts(2, 64, 64), 0, 1)


def test_words_on_the_cpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int4_24_v6_steps, "why_not_on", why_not_on)
    with pytest.raises(ContractError, match="words are on cpu, and v6 runs on NVIDIA GPUs"):
        FusedMoE(exact_experts(2, 64, 64), 1, 1)
