"""NVIDIA's compiler and disassembler, where they are installed, and what they make of a kernel."""

from __future__ import annotations

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

from ttnn_moe.cuda.jit.spec import Spec
from ttnn_moe.sources import kernel_path

NVCC = shutil.which("nvcc")
_TRITON = find_spec("triton")
_FOLDERS = (_TRITON.submodule_search_locations if _TRITON else None) or []
NVDISASM = next((path for folder in _FOLDERS for path in Path(folder).rglob("nvdisasm")), None)
"""Triton's wheel has one."""


def nvcc(spec: Spec, cubin: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Compile a kernel for its architecture, with these flags too."""
    root, arch = kernel_path("gpu_kernels", "cuda"), spec.arch.removeprefix("sm_")
    command = [str(NVCC), "-std=c++17", "-cubin", f"-gencode=arch=compute_{arch},code=sm_{arch}", f"-I{root}", *flags]
    command += [*(f"-D{name}={value}" for name, value in spec.defines), "-o", str(cubin), str(root / f"{spec.name}.cu")]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def listing(cubin: Path) -> str:
    return subprocess.run([str(NVDISASM), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
