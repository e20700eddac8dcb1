"""The Triton kernels for Ascend in Triton's interpreter; triton-ascend's own: make test-ascend-triton."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "ascend_triton_cases.py"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_interpreted() -> None:
    done = subprocess.run(
        [sys.executable, CASES, "interpret"], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("ok   gate_up") == 4 and done.stdout.count("ok   combine") == 4


def test_every_kernel_is_among_the_cases() -> None:
    folder = CASES.parents[1] / "gpu_kernels" / "ascend"
    text = CASES.read_text()
    names = [path.stem for path in folder.glob("*.py")]
    assert sorted(names) == ["combine", "gate_up"]
    assert all(f"from gpu_kernels.ascend.{name} import {name}" in text for name in names)
