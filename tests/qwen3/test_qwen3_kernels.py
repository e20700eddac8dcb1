"""The model's Triton kernels: by Triton's interpreter, compiled for GPUs that are not here, and on a GPU that is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from processes import run_interpreted, run_pytest
from triton_offline import BF16, F16, F32, I32, I64, SHARED_KIB, compile_kernel
from ttnn_moe.cuda.attention import decode, prefill
from ttnn_moe.cuda.attention.memory import within
from ttnn_moe.cuda.linear import few_rows
from ttnn_moe.cuda.router import sliced

FILES = [f"tests/support/qwen3_{name}_cases.py" for name in ("kernel", "attention", "decode", "engine")]


@pytest.mark.slow(100)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the cases run on the GPU")
def test_cases_in_the_interpreter() -> None:
    run_interpreted(*FILES)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("file", FILES)
def test_cases_on_the_gpu(file: str) -> None:
    run_pytest(file, "-n", "4", "--dist", "load")


ELEMENT = {BF16: 2, F16: 2, F32: 4}
PRODUCTS = {"router_logits", "decode_attention", "prefill_attention"}
POINTERS = ("x", "norm", "weight", "bias", "residual", "out", "normed")
# kernel, types of its arguments, constants, options
Launch = tuple[str, dict[str, Any], dict[str, Any], dict[str, int]]


def _launches(x: str) -> list[Launch]:
    """Every kernel with the sizes of Qwen3-30B-A3B, as ttnn_moe/cuda launches it for tensors of type x."""
    fp32 = x == F32
    block_n, block_k, warps = few_rows.tile(2, 5120, 2048)
    tile = decode.tile(128, ELEMENT[x])
    fill = prefill.tile(128, ELEMENT[x])
    wide, wide_fill = decode.tile(256, ELEMENT[x]), prefill.tile(256, ELEMENT[x])
    precision = "ieee" if fp32 else "tf32"
    heads = {"KV": 4, "G": 8}
    one = {**heads, "PRECISION": precision, "G_PAD": 16}
    kv = {"keys": x, "values": x}
    where = {"rows": I64, "positions": I64, "num_tokens": I32}
    one_query = {"q": x, **kv, **where, "out": x, "partial": F32, "lse": F32, "scale": "fp32", "capacity": "i32x16"}
    prompts = {"q": x, **kv, "tiles": I32, "out": x, "scale": "fp32", "capacity": "i32x16"}
    routes = [sliced.tile(T, ELEMENT[x]) for T in (32, 64, 65)]
    logits = {"x": x, "norm": x, "weight": x, "partial": F32, "squares": F32, "T": "i32", "E": "i32x16", "H": "i32x16"}
    topk = {
        **{"logits": x, "partial": F32, "squares": F32, "x": x, "norm": x, "normed": x, "ids": I32, "weights": F32},
        **{"eps": "fp32", "T": "i32", "E": "i32x16", "H": "i32x16"},
    }
    dense, paged = {"pages": None, "PAGE": 0, "STRIDE": 128}, {"PAGE": 64, "STRIDE": 128}
    beside = {"PAGE": 64, "STRIDE": 256}  # keys and values side by side
    best = {"K": 8, "RENORMALISE": True, "E_PAD": 128, "K_PAD": 8}
    row = {"T": 2, "K": 2048, "T_PAD": 2, "BLOCK_N": block_n, "BLOCK_K": block_k}
    parts = dict.fromkeys(("NORM", "BIAS", "ADD", "KEEP"), True)
    split = {**one, "D": 128, "SPLITS": 4, "BOUND": True}
    fills = {**heads, "PRECISION": precision}

    def rope(Q: int, rows: int, warps: int, memory: dict[str, Any]) -> Launch:
        """Heads of q (none: the rotated keys of a prompt alone) and of k and v, into dense rows or pages."""
        given = {**dict.fromkeys(("qkv", "q_norm", "k_norm", "cos", "sin"), x), **where, "q": x, **kv}
        pages = {} if "pages" in memory else {"pages": I32}
        constants = {"Q": Q, "KV": 4, "D": 128, "BOUND": True, "BLOCK_R": rows, **memory}
        given |= {**pages, "eps": "fp32", "T": "i32", "capacity": "i32x16"}
        return "head_norm_rope", given, constants, {"num_warps": warps}

    return [
        ("rms_norm", {"x": x, "weight": x, "out": x, "eps": "fp32", "H": "i32x16"}, {"BLOCK": 2048}, {"num_warps": 8}),
        (
            "few_linear",
            {**dict.fromkeys(POINTERS, x), "eps": "fp32", "N": "i32x16"},
            {**row, **parts},
            {"num_warps": warps},
        ),
        rope(32, 16, 4, dense),
        rope(32, 1, 1, paged),
        rope(0, 16, 4, paged),
        rope(32, 1, 1, beside),
        *(
            (
                "router_logits",
                logits,
                {"PRECISION": precision, **route.constants},
                {"num_warps": route.warps, "num_stages": route.stages},
            )
            for route in routes
        ),
        ("router_topk", topk, {**best, "SLICES": 0, "S_PAD": 1, "H_PAD": 1}, {"num_warps": 1}),
        ("router_topk", topk, {**best, "E_PAD": 512, "SLICES": 8, "S_PAD": 8, "H_PAD": 2048}, {"num_warps": 1}),
        ("router_topk", topk, {**best, "SLICES": 8, "S_PAD": 8, "H_PAD": 2048}, {"num_warps": 4}),
        *(
            ("decode_attention", {**one_query, **pages}, {**sizes, **used.constants}, {"num_warps": used.warps})
            for pages, sizes, used in (
                ({}, {**split, **dense}, tile),
                ({"pages": I32}, {**split, **paged}, within(tile, 64)),
                ({"pages": I32}, {**split, **beside}, within(tile, 64)),
                ({}, {**one, **dense, "STRIDE": 256, "D": 256, "SPLITS": 1, "BOUND": False}, wide),
            )
        ),
        (
            "merge_attention",
            {"partial": F32, "lse": F32, "out": x},
            {"D": 128, "SPLITS": decode.MAX_SPLITS},
            {"num_warps": 4},
        ),
        *(
            ("prefill_attention", {**prompts, **pages}, {**fills, **sizes, **used.constants}, {"num_warps": used.warps})
            for pages, sizes, used in (
                ({}, {**dense, "D": 128}, fill),
                ({"pages": I32}, {**paged, "D": 128}, within(fill, 64)),
                ({"pages": I32}, {**paged, "D": 128}, within(prefill.tile(128, ELEMENT[x], warpgroups=False), 64)),
                ({}, {**dense, "STRIDE": 256, "D": 256}, wide_fill),
            )
        ),
    ]


@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.parametrize("x", list(ELEMENT))
def test_kernels_compile_for_gpus_that_are_not_here(x: str, capability: int) -> None:
    """As launched there, within the shared memory of the smallest relative: sm_86 and sm_120 have 99 KiB."""
    for name, arguments, constants, options in _launches(x):
        if name != "prefill_attention":
            constants = {**constants, "PDL": capability >= 90}
        compiled = compile_kernel(name, arguments, constants, capability, **options)
        ptx = compiled.asm["ptx"]
        limit = SHARED_KIB[90 if capability == 90 else 120] << 10
        assert compiled.metadata.shared <= limit, (name, constants, compiled.metadata.shared)
        if x != F32:  # those are exact products, on the CUDA cores
            assert ("mma" in ptx) == (name in PRODUCTS), name
        if constants.get("PDL"):
            assert "griddepcontrol.wait" in ptx, name
