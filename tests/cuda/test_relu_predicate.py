"""Machine code of sm_90a: no use of VIMNMX.RELU's predicates.

ptxas of CUDA 13.0 and 13.1 makes max(0, min(n, x)) and a comparison of it with n one VIMNMX.RELU. Its predicate is not
that comparison: at one token, arranged gpt-oss weights took scales of other rows on an H200. NVRTC 13.5 does not do so.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_cuda_sources import USES

from machine_code import NVCC, NVDISASM, listing, nvcc
from ttnn_moe.cuda.jit.spec import Spec

SPECS = sorted({use.spec for use in USES if use.spec.arch == "sm_90a"}, key=str)


def _boxed(spec: Spec) -> bool:
    """Whether it has boxes, whose rows are such a number."""
    return dict(spec.defines).get("BOXED") == "1"


@pytest.mark.slow(2)
@pytest.mark.skipif(NVCC is None or NVDISASM is None, reason="nvcc or nvdisasm is not here")
@pytest.mark.parametrize(
    "spec", [pytest.param(spec, marks=[pytest.mark.long] * (not _boxed(spec))) for spec in SPECS], ids=str
)
def test_no_comparison_is_its_predicate(spec: Spec, tmp_path: Path) -> None:
    cubin = tmp_path / "cubin"
    done = nvcc(spec, cubin)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"\bVIMNMX\S*\.RELU R\w+, (P\d|PT, P\d)", listing(cubin))
