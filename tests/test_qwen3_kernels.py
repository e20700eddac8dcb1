"""The model's Triton kernels without a GPU: through the interpreter against torch, and compiled for three GPUs."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]

pytest.importorskip("triton")


@pytest.mark.slow
def test_kernels_compute_what_torch_does() -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET when a kernel is defined."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    cases = [str(ROOT / "tests" / name) for name in ("qwen3_kernel_cases.py", "qwen3_decode_cases.py")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *cases, "-q", "-n", "0", "-p", "no:cacheprovider"],
        capture_output=True, text=True, cwd=ROOT, timeout=600, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


SHARED_KIB = {80: 163, 90: 227, 120: 99}
BF16, F32, I32, I64 = "*bf16", "*fp32", "*i32", "*i64"
# of Qwen3-30B-A3B: kernel -> (arguments, constants, warps)
KERNELS: dict[str, tuple[dict[str, str], dict[str, Any], int]] = {
    "rms_norm": (
        {"x": BF16, "weight": BF16, "out": BF16, "eps": "fp32", "H": "i32"},
        {"BLOCK": 2048},
        8,
    ),
    "few_linear": (
        {
            "x": BF16, "norm": BF16, "weight": BF16, "bias": BF16, "residual": BF16, "out": BF16, "normed": BF16,
            "eps": "fp32", "N": "i32",
        },
        {
            "T": 3, "K": 2048, "NORM": True, "BIAS": True, "ADD": True, "KEEP": True,
            "T_PAD": 4, "BLOCK_N": 4, "BLOCK_K": 512,
        },
        2,
    ),
    "head_norm_rope": (
        {
            "qkv": BF16, "q_norm": BF16, "k_norm": BF16, "cos": BF16, "sin": BF16, "rows": I64, "positions": I64,
            "num_tokens": I32, "q": BF16, "keys": BF16, "values": BF16, "eps": "fp32", "T": "i32", "capacity": "i32",
        },
        {"Q": 32, "KV": 4, "D": 128, "BOUND": True, "BLOCK_R": 16},
        4,
    ),
    "router_topk": (
        {"logits": BF16, "ids": I32, "weights": F32, "E": "i32"},
        {"K": 8, "RENORMALISE": True, "E_PAD": 128, "K_PAD": 8},
        1,
    ),
    "decode_attention": (
        {
            "q": BF16, "keys": BF16, "values": BF16, "rows": I64, "positions": I64, "num_tokens": I32,
            "out": BF16, "partial": F32, "lse": F32, "scale": "fp32", "capacity": "i32",
        },
        {
            "KV": 4, "G": 8, "D": 128, "SPLITS": 4, "BOUND": True, "PRECISION": "tf32",
            "G_PAD": 16, "BLOCK_N": 64, "STAGES": 3,
        },
        4,
    ),
    "merge_attention": (
        {"partial": F32, "lse": F32, "out": BF16},
        {"D": 128, "SPLITS": 64},
        4,
    ),
    "prefill_attention": (
        {
            "q": BF16, "keys": BF16, "values": BF16, "tiles": I32, "out": BF16, "scale": "fp32", "capacity": "i32",
        },
        {"KV": 4, "G": 8, "D": 128, "PRECISION": "tf32", "BLOCK_M": 128, "BLOCK_N": 64, "STAGES": 3},
        8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("capability", list(SHARED_KIB))
@pytest.mark.parametrize("name", list(KERNELS))
def test_kernels_compile_for_gpus_that_are_not_here(name: str, capability: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(f"gpu_kernels.triton.{name}"), name)
    arguments, constants, warps = KERNELS[name]
    constants = dict(constants)
    if "PDL" in function.arg_names:
        constants["PDL"] = capability >= 90
    signature = {**arguments, **dict.fromkeys(constants, "constexpr")}
    assert list(signature.keys() - set(function.arg_names)) == []
    # what launches find out of the arguments: these are multiples of 16
    hints = {
        (function.arg_names.index(n),): [["tt.divisibility", 16]]
        for n, t in arguments.items()
        if t.startswith("*") or n in ("H", "N", "capacity")
    }
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=hints)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    assert f".target sm_{capability}" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= SHARED_KIB[capability] << 10
    products = {"decode_attention", "prefill_attention"}
    assert ("mma" in compiled.asm["ptx"]) == (name in products)
    if capability >= 90 and constants.get("PDL"):
        assert "griddepcontrol.wait" in compiled.asm["ptx"]
