"""NVIDIA's compiler and disassembler, where they are installed, and what they make of a kernel."""

from __future__ import annotations

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

NVCC = shutil.which("nvcc")
_TRITON = find_spec("triton")
_FOLDERS = (_TRITON.submodule_search_locations if _TRITON else None) or []
NVDISASM = next((path for folder in _FOLDERS for path in Path(folder).rglob("nvdisasm")), None)
"""Triton's wheel has one."""


def listing(cubin: Path) -> str:
    return subprocess.run([str(NVDISASM), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
