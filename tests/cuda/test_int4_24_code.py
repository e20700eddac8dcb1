"""Machine code of the fast kernels of int4_24: their products are sparse, and nothing else is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from machine_code import NVDISASM, listing
from ttnn_moe import Problem
from ttnn_moe.cuda.arch import ARCHES, HOPPER, Arch, Target
from ttnn_moe.cuda.device import H200
from ttnn_moe.cuda.jit import build
from ttnn_moe.cuda.moe.cuda_cpp import CudaCpp
from ttnn_moe.cuda.moe.int4_24_few import INT4_24_FEW
from ttnn_moe.cuda.moe.sm80_int4_24 import INT4_24
from ttnn_moe.cuda.moe.sm80_int4_24_fp16 import INT4_24_FP16
from ttnn_moe.cuda.moe.sm90_int4_24 import INT4_24_SM90
from ttnn_moe.cuda.moe.sm90_int4_24_few import INT4_24_FEW_SM90
from ttnn_moe.cuda.moe.sm90_int4_24_fp16 import INT4_24_FP16_SM90
from ttnn_moe.formats.int4_24 import NAME


@pytest.mark.slow(4)
@pytest.mark.skipif(build.why_not() is not None or NVDISASM is None, reason="NVRTC or nvdisasm is not here")
@pytest.mark.parametrize(
    ("family", "arch", "T", "products"),
    [
        (INT4_24_FEW, ARCHES[8, 0], 1, r"HMMA\.SP\.16832\.F32\.BF16"),
        (INT4_24_FEW_SM90, HOPPER, 1, r"HMMA\.SP\.16832\.F32\.BF16"),
        (INT4_24, ARCHES[8, 0], 128, r"HMMA\.SP\.16832\.F32\.BF16"),
        (INT4_24_FP16, ARCHES[8, 0], 4096, r"HMMA\.SP\.16832\.F32"),
        (INT4_24_SM90, HOPPER, 8, r"HGMMA\.SP\.64x\d+x32\.F32\.BF16"),
        (INT4_24_FP16_SM90, HOPPER, 1000, r"HGMMA\.SP\.64x\d+x32\.F32"),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_every_product_is_sparse(family: CudaCpp[Any], arch: Arch, T: int, products: str, tmp_path: Path) -> None:
    problem = Problem(T, 256, 8, 7168, 2048, weight_format=NAME)
    uses = family.uses(family.plan(problem, Target(H200, arch)), ids64=False, add=False)
    for use in uses:
        if not re.search("mlp|few|many", use.spec.name):
            continue
        cubin = tmp_path / "cubin"
        cubin.write_bytes(build.compile_spec(use.spec))
        made = re.findall(r"\bH?G?MMA\.\S+", listing(cubin))
        assert made and all(re.match(products, product) for product in made), use.spec.name
