"""Machine code of sm_90a: no use of VIMNMX.RELU's predicates.

ptxas of CUDA 13.0 and 13.1 makes max(0, min(n, x)) and a comparison of it with n one VIMNMX.RELU. Its predicate is not
that comparison: at one token, arranged gpt-oss weights took scales of other rows on an H200. NVRTC 13.5 does not do so.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from test_cuda_sources import USES

from machine_code import NVCC, NVDISASM, listing
from ttnn_moe.cuda.jit.spec import Spec
from ttnn_moe.sources import kernel_path

SPECS = sorted({use.spec for use in USES if use.spec.arch == "sm_90a"}, key=str)
HAD_IT = "sm80/mxfp4_few_gate_up"


@pytest.mark.slow(2)
@pytest.mark.skipif(NVCC is None or NVDISASM is None, reason="nvcc or nvdisasm is not here")
@pytest.mark.parametrize(
    "spec", [pytest.param(spec, marks=[pytest.mark.long] * (spec.name != HAD_IT)) for spec in SPECS], ids=str
)
def test_no_comparison_is_its_predicate(spec: Spec, tmp_path: Path) -> None:
    root, cubin = kernel_path("gpu_kernels", "cuda"), tmp_path / "cubin"
    flags = ["-std=c++17", "-cubin", "-gencode=arch=compute_90a,code=sm_90a", f"-I{root}"]
    flags += [f"-D{name}={value}" for name, value in spec.defines]
    command = [str(NVCC), *flags, "-o", str(cubin), str(root / f"{spec.name}.cu")]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    assert not re.search(r"\bVIMNMX\S*\.RELU R\w+, (P\d|PT, P\d)", listing(cubin))
