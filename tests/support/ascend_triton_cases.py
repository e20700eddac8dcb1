"""The Triton kernels for Ascend, run by the interpreter or compiled for a 910B3, in whatever Triton is installed.

TRITON_INTERPRET=1 python tests/support/ascend_triton_cases.py interpret
python tests/support/ascend_triton_cases.py compile        # with triton-ascend, and ascendnpu-ir's compiler on PATH
"""

from __future__ import annotations

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

from paths import ROOT

sys.path.insert(0, str(ROOT))

import torch
import triton
from torch import Tensor

from ttnn_moe.ascend import tiles
from ttnn_moe.gpu_kernels.ascend.combine import combine
from ttnn_moe.gpu_kernels.ascend.gate_up import gate_up

TARGET = "Ascend910B3"
Tile = tuple[Any, dict[str, str], dict[str, Any]]
"""A kernel, the types of its arguments, its constants."""


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


BF16, FP16, FP32 = "*bf16", "*fp16", "*fp32"
HIVMC = "External hivmc run fails, returning module before running external compiler"


def gate_up_tile(dtype: str, block_m: int, block_n: int = tiles.BLOCK_N, block_k: int = tiles.BLOCK_K) -> Tile:
    """Arguments of gate_up and of its tile."""
    routed = dict.fromkeys(("ends", "row_tokens", "tiles", "num_tiles"), "*i32")
    signature = {"hidden": dtype, "gate_up": dtype, **routed, "act": dtype, "H": "i32", "I": "i32"}
    return gate_up, signature, {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "CAST": False}


def combine_tile(dtype: str, out: str, block_h: int) -> Tile:
    """Arguments of combine and of its block."""
    signature = {"rows": dtype, "inverse": "*i32", "weights": FP32, "out": out, "T": "i32", "H": "i32"}
    return combine, signature, {"K": 8, "BLOCK_H": block_h}


CHOICES = [
    *(gate_up_tile(dtype, block) for dtype in (BF16, FP16) for block in tiles.BLOCKS_M),
    *(combine_tile(a, b, h) for a in (BF16, FP16) for b in (a, FP32) for h in tiles.BLOCKS_H),
]
"""Every tile that the backend can choose."""

TOO_LARGE = [gate_up_tile(BF16, 128), gate_up_tile(BF16, 64, 256), combine_tile(BF16, BF16, 16384)]


def compile_all() -> None:
    """Every choice for a 910B3: through bishengir-compile where it is on PATH, as far as it goes without CANN's hivmc.

    Without bishengir-compile: to linalg.
    """
    from triton.backends import backends

    if (compiler := shutil.which("bishengir-compile")) is not None:
        # triton-ascend asks CANN's driver for the chip, and CANN is not here
        chip = SimpleNamespace(get_arch=lambda: TARGET)
        backends["ascend"].compiler.add_stages.__globals__["NPUUtils"] = lambda: chip
    with ThreadPoolExecutor(2) as pool:
        failures = list(pool.map(partial(why_not, compiler), CHOICES))
        refused = list(pool.map(partial(why_not, compiler), TOO_LARGE)) if compiler else []
    how = "planned in memory; the binary needs CANN's hivmc" if compiler else "to linalg; bishengir-compile is not here"
    for tile, reason in zip(CHOICES, failures, strict=True):
        print(f"ok   {describe(tile)}: {how}" if reason is None else f"FAIL {describe(tile)}: {reason}")
    for tile, reason in zip(TOO_LARGE, refused, strict=False):
        assert reason is not None and "ub overflow" in reason, f"{describe(tile)} is too large, and nothing says so"
        print(f"ok   {describe(tile)} is refused: {reason.split('ub overflow, ')[1].split('!')[0]}")
    assert not any(failures), "a tile does not compile"


def describe(tile: Tile) -> str:
    """A kernel, its pointer types and its constants."""
    kernel, signature, constants = tile
    types = sorted({kind[1:] for kind in signature.values() if kind in (BF16, FP16, FP32)})
    return f"{kernel.fn.__name__} {'/'.join(types)} {constants} for {TARGET}"


def why_not(compiler: str | None, tile: Tile) -> str | None:
    """What stops a tile before CANN's own tools, in the compilers' words; None: nothing does."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, signature, constants = tile
    source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants)
    try:
        triton.compile(source, target=GPUTarget("npu", TARGET, 0))
    except Exception as error:  # triton-ascend's own class, which says at which stage
        text = str(error)
        if "ConvertLinalgRToBinary" not in text:
            return text
        if compiler is None:
            return None if "ASCEND_HOME_PATH" in text else text
        # a tile that fits only after a retry without double buffering is none of ours
        return None if HIVMC in text and "overflow" not in text else text
    return None


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_all}[sys.argv[1]]()
