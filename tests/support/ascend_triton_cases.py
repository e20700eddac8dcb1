"""The Triton kernels for Ascend, run by the interpreter or compiled for a 910B3, in whatever Triton is installed.

TRITON_INTERPRET=1 python tests/support/ascend_triton_cases.py interpret
python tests/support/ascend_triton_cases.py compile        # with triton-ascend: as far as it goes without CANN
"""

from __future__ import annotations

import sys

from paths import ROOT

sys.path.insert(0, str(ROOT))

import torch
import triton
from torch import Tensor

from ttnn_moe.gpu_kernels.ascend.combine import combine
from ttnn_moe.gpu_kernels.ascend.gate_up import gate_up

TARGET = "Ascend910B3"


# one rounding to act or out; the interpreter cuts bf16 off instead of rounding it
BOUND = {torch.bfloat16: 2**-7, torch.float16: 1e-3, torch.float32: 1e-5}


def check(what: str, got: Tensor, want: Tensor) -> None:
    """Every row within the bound of its dtype."""
    bound = BOUND[got.dtype]
    errors = (got.double() - want.double()).norm(dim=1) / want.double().norm(dim=1).clamp_min(1e-30)
    worst = float(errors.nan_to_num(nan=float("inf")).max())
    assert worst <= bound, f"{what}: a row is off by {worst:.2e}"
    print(f"ok   {what}: error {worst:.1e}")


def run_gate_up(T: int, E: int, K: int, H: int, I: int, dtype: torch.dtype, programs: int = 3) -> None:
    """Routed rows with an expert that has none, rows that are padding, sizes that no block divides."""
    BLOCK_M = 16
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, H, generator=g).to(dtype)
    weight = (torch.randn(E, 2 * I, H, generator=g) * H**-0.5).to(dtype)
    ids = torch.randint(0, E, (T * K,), generator=g)
    ids[ids == 1] = 0
    order = ids.sort(stable=True).indices
    tokens, counts = (order // K).int(), torch.bincount(ids, minlength=E)
    tokens[2] = -1
    ends = counts.cumsum(0).int()
    tiles = [(e, first) for e in range(E) for first in range(int(ends[e] - counts[e]), int(ends[e]), BLOCK_M)]
    act = torch.full((T * K, I), 1e4).to(dtype)
    listed, n = torch.tensor(tiles, dtype=torch.int32), torch.tensor([len(tiles)], dtype=torch.int32)
    blocks = {"BLOCK_M": BLOCK_M, "BLOCK_N": 32, "BLOCK_K": 16, "CAST": True}
    gate_up[(programs,)](hidden, weight, ends, tokens, listed, n, act, H, I, **blocks)
    x = hidden[tokens.clamp_min(0).long()].double()
    gate, up = torch.einsum("rh,rnh->rn", x, weight.double()[ids[order]]).chunk(2, -1)
    want = gate / (1 + (-gate).exp()) * up
    assert bool((act[2] == 0).all()), "a row of padding is zero"
    keep = torch.arange(T * K) != 2
    check(f"gate_up T={T} E={E} K={K} H={H} I={I} {dtype}", act[keep], want[keep])


def run_combine(T: int, K: int, H: int, dtype: torch.dtype, programs: int = 3) -> None:
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(T * K, H, generator=g).to(dtype)
    inverse = torch.randperm(T * K, generator=g).int().view(T, K)
    weights = torch.rand(T, K, generator=g)
    if K > 1:
        rows[inverse[0, 1]], weights[0, 1] = float("nan"), float("nan")
        inverse[0, 1] = -1
    out = torch.full((T, H), 1e4).to(dtype)
    combine[(programs,)](rows, inverse, weights, out, T, H, K=K, BLOCK_H=64)
    picked = torch.where(inverse[..., None] >= 0, rows[inverse.clamp_min(0).long()].double(), 0.0)
    want = (picked * torch.where(inverse >= 0, weights, 0.0).double()[..., None]).sum(1)
    check(f"combine T={T} K={K} H={H} {dtype}", out, want)


def interpret() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        run_gate_up(13, 4, 2, 48, 40, dtype)
        run_combine(7, 3, 100, dtype)
    run_gate_up(40, 3, 1, 72, 32, torch.float32, programs=50)
    run_combine(1, 1, 64, torch.float32, programs=9)


def compile_all() -> None:
    """For a 910B3 at Qwen3-30B-A3B's blocks: to linalg, which is as far as it goes without CANN's bishengir-compile."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    routed = dict.fromkeys(("ends", "row_tokens", "tiles", "num_tiles"), "*i32")
    kernels = (
        (
            gate_up,
            {"hidden": "*bf16", "gate_up": "*bf16", **routed, "act": "*bf16", "H": "i32", "I": "i32"},
            {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "CAST": False},
        ),
        (
            combine,
            {"rows": "*bf16", "inverse": "*i32", "weights": "*fp32", "out": "*bf16", "T": "i32", "H": "i32"},
            {"K": 8, "BLOCK_H": 2048},
        ),
    )
    for kernel, signature, constants in kernels:
        source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants)
        name = kernel.fn.__name__
        try:
            compiled = triton.compile(source, target=GPUTarget("npu", TARGET, 0))
        except Exception as error:  # triton-ascend's own class, which says at which stage
            text = str(error)
            assert "ConvertLinalgRToBinary" in text and "ASCEND_HOME_PATH" in text, text
            print(f"ok   {name}: compiled for {TARGET} to linalg; the binary needs CANN")
        else:
            print(f"ok   {name}: compiled for {TARGET}, {sorted(compiled.asm)}")


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_all}[sys.argv[1]]()
