"""Combine between nodes through NCCL's device API: the header compiles. It never ran, here or elsewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from ttnn_moe.cuda.combine.rank_combine import Plan
from ttnn_moe.sources import kernel_path

NVCC = shutil.which("nvcc")
ROOT = kernel_path("gpu_kernels", "cuda")
NVIDIA = find_spec("nvidia")
FOLDERS = (NVIDIA.submodule_search_locations if NVIDIA else None) or []
HEADERS = (Path(folder) / "nccl" / "include" / "nccl_device.h" for folder in FOLDERS)
INCLUDE = next((header.parent for header in HEADERS if header.is_file()), None)


def calls(form: str) -> dict[str, str]:
    """Functions of a form that the kernel calls, with their parameters."""
    kernel = "".join((ROOT / "combine" / name).read_text() for name in ("rank_combine.cu", "rings.cuh", "publish.cuh"))
    source = (ROOT / "combine" / form).read_text()
    found = dict(re.findall(r"\b(\w+)\(((?:const )?[CG]\w*&? ?[^()]*)\) \{", source))
    return {name: " ".join(given.split()) for name, given in found.items() if f"{name}(" in kernel}


def test_both_forms_have_the_same_calls() -> None:
    assert sorted(calls("peers.cuh")) == ["dead", "look", "release_tail", "return_head", "slot_between", "tell"]
    assert calls("network.cuh") == calls("peers.cuh")


@pytest.mark.slow(9)
@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
@pytest.mark.skipif(INCLUDE is None, reason="no nccl_device.h; to have it: pip install 'ttnn-moe[nodes]'")
def test_nvcc_compiles_the_network_form(tmp_path: Path) -> None:
    """For sm_90a, with every GIN backend of the headers."""
    spec, cubin = Plan(2, 4, 2048, 128, bulk=True).spec("sm_90a"), tmp_path / "cubin"
    flags = f"-std=c++17 -cubin -arch={spec.arch} -Werror all-warnings -Xptxas -O1 -DNETWORK=1".split()
    flags += [f"-I{ROOT}", f"-I{INCLUDE}", *(f"-D{name}={value}" for name, value in spec.defines)]
    command = [str(NVCC), *flags, "-o", str(cubin), str(ROOT / f"{spec.name}.cu")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    code = cubin.read_bytes()
    assert code[:4] == b"\x7fELF"
    assert all(name.encode() in code for name in ("look", "tell", "release_tail", "return_head"))
