"""Compiling a Triton kernel for a GPU that is not here."""

from __future__ import annotations

import importlib
from typing import Any

SHARED_KIB = {80: 163, 86: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory that a block may have, by compute capability."""

BF16, F16, F32, I32, I64 = "*bf16", "*fp16", "*fp32", "*i32", "*i64"


def compile_kernel(name: str, arguments: dict[str, str], constants: dict[str, Any], capability: int, **options: int):
    """Compile gpu_kernels/triton/<module>.py's function for sm_<capability>, as a launch would.

    Args:
        name: module, or "module:function".
        arguments: types of those that are not constants, as Triton writes them; "i32x16": a multiple of 16. Pointers
            are taken to be aligned to 16 bytes.
        options: num_warps, num_stages.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, function_name = name.partition(":")
    function = getattr(importlib.import_module(f"ttnn_moe.gpu_kernels.triton.{module}"), function_name or module)
    aligned = [n for n, kind in arguments.items() if kind.startswith("*") or kind.endswith("x16")]
    signature = {n: kind.removesuffix("x16") for n, kind in arguments.items()} | dict.fromkeys(constants, "constexpr")
    assert signature.keys() == set(function.arg_names), signature.keys() ^ set(function.arg_names)
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs=constants,
        attrs={(function.arg_names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert f".target sm_{capability}" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= SHARED_KIB[capability] << 10, f"{name}: {compiled.metadata.shared} bytes"
    return compiled
