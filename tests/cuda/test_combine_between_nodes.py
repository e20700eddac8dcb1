"""Combine between nodes through NCCL's device API: the header compiles. It never ran, here or elsewhere."""

from __future__ import annotations

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from machine_code import NVCC
from ttnn_moe.cuda.combine.rank_combine import Plan
from ttnn_moe.cuda.jit import build
from ttnn_moe.cuda.jit.spec import Spec
from ttnn_moe.sources import kernel_path

STAND_IN = Path(__file__).parents[1] / "support" / "nccl_stand_in"
ROOT = kernel_path("gpu_kernels", "cuda")
NVIDIA = find_spec("nvidia")
FOLDERS = (NVIDIA.submodule_search_locations if NVIDIA else None) or []
OF_2_30 = "ncclGin_StrongVASignalAdd"
INCLUDES = (Path(folder) / "nccl" / "include" for folder in FOLDERS)
INCLUDE = next((at for at in INCLUDES if any(OF_2_30 in file.read_text() for file in at.rglob("*gin*.h"))), None)


def calls(form: str) -> dict[str, str]:
    """Functions of a form that the kernel calls, with their parameters."""
    kernel = "".join((ROOT / "combine" / name).read_text() for name in ("rank_combine.cu", "rings.cuh", "publish.cuh"))
    source = (ROOT / "combine" / form).read_text()
    found = dict(re.findall(r"\b(\w+)\(((?:const )?[CG]\w*&? ?[^()]*)\) \{", source))
    return {name: " ".join(given.split()) for name, given in found.items() if f"{name}(" in kernel}


def test_both_forms_have_the_same_calls() -> None:
    assert sorted(calls("peers.cuh")) == ["dead", "look", "release_tail", "return_head", "slot_between", "tell"]
    assert calls("network.cuh") == calls("peers.cuh")


@pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
def test_the_network_form_compiles_with_the_calls_that_it_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stand-in for NCCL's headers, whose wheel is too large for every run of the tests."""
    options = build.options

    def with_stand_in(spec: Spec) -> dict[str, Any]:
        made = options(spec)
        return made | {"include_path": [*made["include_path"], str(STAND_IN)]}

    monkeypatch.setattr(build, "options", with_stand_in)
    plan = Plan(2, 4, 2048, 128, bulk=True)
    code = build.compile_spec(Spec.of(plan.spec("sm_90a").name, "sm_90a", **plan.defines(), NETWORK=True))
    assert code[:4] == b"\x7fELF"
    assert all(name.encode() in code for name in ("look", "tell", "release_tail", "return_head"))


@pytest.mark.slow(9)
@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
@pytest.mark.skipif(
    INCLUDE is None, reason="no device headers of NCCL 2.30 or newer; to have them: pip install '.[nodes]'"
)
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
