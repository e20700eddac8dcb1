"""CUDA C++ sources without a GPU: compiled by nvcc (registers, spills, shared memory) and by NVRTC."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ttnn_moe import Problem
from ttnn_moe.activations import CLAMPED_SWIGLU
from ttnn_moe.cuda.arch import ARCHES, HOPPER, Arch, Target
from ttnn_moe.cuda.attention import prefill_sm90
from ttnn_moe.cuda.device import H200
from ttnn_moe.cuda.jit import build
from ttnn_moe.cuda.jit.spec import Spec
from ttnn_moe.cuda.jit.store import Store
from ttnn_moe.cuda.linear import decode_linear
from ttnn_moe.cuda.moe.families import CUDA_CPP, choose
from ttnn_moe.cuda.moe.few import FEW
from ttnn_moe.cuda.moe.mxfp4_few import MXFP4_FEW
from ttnn_moe.cuda.moe.sm80_mxfp4 import MXFP4
from ttnn_moe.cuda.moe.sm90_mxfp4 import MXFP4_SM90
from ttnn_moe.cuda.moe.uses import Use
from ttnn_moe.sources import kernel_path

ROOT = kernel_path("gpu_kernels", "cuda")
NVCC = shutil.which("nvcc")
E, K = 128, 8
PRODUCTS = ("grouped_mlp",)


def _uses(arch: Arch) -> list[Use]:
    """Every kernel of a GPU, with every size that these tokens can make a plan choose."""
    target, found = Target(H200, arch), set()
    product = next(family for family in CUDA_CPP if family.name == arch.products)
    for family, tokens in ((FEW, [1]), (product, [1 << i for i in range(18)])):
        for T in tokens:
            problem = Problem(T, E, K, 64, 64)
            found.update(family.uses(family.plan(problem, target), ids64=False, add=False))
        other = Problem(tokens[-1], E, K, 64, 64, torch.float16, torch.float32)
        found.update(family.uses(family.plan(other, target), ids64=True, add=True))
    return sorted(found, key=lambda use: str(use.spec))


def _int4_24_uses(arch: Arch) -> list[Use]:
    """Of DeepSeek-V3's sizes, with every tile. Sort and combine are compiled for dense weights."""
    target, uses = Target(H200, arch), set[Use]()
    for T in (1, 8, 300, 1000, 4096):
        problem = Problem(T, 256, K, 7168, 2048, weight_format="int4_24")
        for family in CUDA_CPP:
            if family.why_not(problem, target) is None:
                uses.update(family.uses(family.plan(problem, target), ids64=False, add=False))
    return sorted((use for use in uses if "int4_24" in use.spec.name), key=lambda use: str(use.spec))


def _hopper_mxfp4_uses() -> list[Use]:
    """Of gpt-oss's sizes, in both orders of rows."""
    target, uses = Target(H200, HOPPER), set[Use]()
    for T, order in ((128, "interleaved"), (4096, "interleaved"), (4096, "halves")):
        problem = Problem(T, E, 4, 2880, 2880, weight_format="mxfp4", gate_up_order=order)
        if order == "interleaved":
            problem = replace(problem, activation=CLAMPED_SWIGLU, biased=True)
        uses.update(MXFP4_SM90.uses(MXFP4_SM90.plan(problem, target), ids64=False, add=False))
    return sorted((use for use in uses if "mxfp4" in use.spec.name), key=lambda use: str(use.spec))


def _mxfp4_uses(arch: Arch, *tokens: int) -> list[Use]:
    """Of gpt-oss-120b's sizes. Sort and combine are compiled for dense weights."""
    uses = set[Use]()
    for T in tokens:
        problem = Problem(T, E, 4, 2880, 2880, weight_format="mxfp4", activation="clamped_swiglu", biased=True)
        family = next(f for f in (MXFP4_FEW, MXFP4) if f.why_not(problem, Target(H200, arch)) is None)
        uses.update(family.uses(family.plan(problem, Target(H200, arch)), ids64=False, add=False))
    return sorted((use for use in uses if "mxfp4" in use.spec.name), key=lambda use: str(use.spec))


SLOW = ("sm90/grouped_mlp", "sm90/mxfp4_mlp", "sm80/mxfp4_mlp")  # to compile: by nvcc alone
ROOM = {arch.name: arch.shared_memory for arch in ARCHES.values()}
# of the other operators of a decoder layer
MODEL = [
    Use(decode_linear.spec_of(4, torch.bfloat16, True, False, 8), decode_linear.shared_memory(8)),
    Use(decode_linear.spec_of(8, torch.float16, False, True, 16), decode_linear.shared_memory(16)),
    Use(decode_linear.spec_of(8, torch.bfloat16, False, True, 32), decode_linear.shared_memory(32)),
    Use(prefill_sm90.spec_of(torch.bfloat16, 0, 8), prefill_sm90.SHARED_MEMORY),
    Use(prefill_sm90.spec_of(torch.bfloat16, 64, 8), prefill_sm90.SHARED_MEMORY),
    Use(prefill_sm90.spec_of(torch.float16, 256, 1), prefill_sm90.SHARED_MEMORY),
]
USES = [
    *MODEL,
    *(use for arch in dict.fromkeys(ARCHES.values()) for use in _uses(arch)),
    *(use for arch in (ARCHES[8, 0], HOPPER) for use in _int4_24_uses(arch)),
    *_hopper_mxfp4_uses(),
    *_mxfp4_uses(ARCHES[8, 0], 1, 32, 512, 4096),
    *_mxfp4_uses(HOPPER, 32),
]


def test_every_source_is_a_kernel_that_some_plan_uses() -> None:
    names = {path.relative_to(ROOT).with_suffix("").as_posix() for path in ROOT.rglob("*.cu")}
    named = {use.spec.name for use in USES}
    assert {name for name in names if not name.startswith("sm120/")} == named, "test_sm120_mxfp4.py has the others"


@pytest.mark.parametrize("arch", dict.fromkeys(ARCHES.values()), ids=lambda arch: arch.name)
def test_no_other_product_is_chosen(arch: Arch) -> None:
    """What is compiled below are all grouped products that any sizes choose."""
    compiled = {use.spec for use in _uses(arch) if use.spec.entry in PRODUCTS}
    for experts in (1, 8, 60, 256, 600):
        for i in range(18):
            chosen = choose(Problem(1 << i, experts, 1, 64, 64), Target(H200, arch), CUDA_CPP)
            assert not isinstance(chosen, str)
            for use in chosen.family.uses(chosen.plan, ids64=False, add=False):
                assert use.spec.entry not in PRODUCTS or use.spec in compiled


@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
@pytest.mark.parametrize("use", USES, ids=lambda use: str(use.spec))
def test_nvcc_compiles_it_without_spills(use: Use, tmp_path: Path) -> None:
    spec = use.spec
    flags = "-std=c++17 -cubin -Xptxas -v -Werror all-warnings".split()
    flags += [f"-gencode=arch={spec.arch.replace('sm', 'compute')},code={spec.arch}", f"-I{ROOT}"]
    flags += [f"-D{name}={value}" for name, value in spec.defines]
    command = [str(NVCC), *flags, "-o", str(tmp_path / "kernel.cubin"), str(ROOT / f"{spec.name}.cu")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    report = done.stderr + done.stdout
    assert done.returncode == 0, report
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report, report
    assert "wgmma" not in report, f"the compiler puts products one after the other: {report}"
    registers = int(re.findall(r"Used (\d+) registers", report)[0])
    static = int((re.findall(r"(\d+) bytes smem", report) or ["0"])[0])
    limits = {"routing_sort": 64, "combine": 112, "few_gate_up": 64, "few_down": 128, "sm80/grouped_mlp": 255}
    said = re.search(r"at most (\d+) registers", (ROOT / f"{spec.name}.cu").read_text())
    assert registers <= (int(said[1]) if said else limits.get(spec.name, limits.get(spec.entry, 168)))
    assert use.shared_memory + static <= ROOM[spec.arch]


@pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
class TestNvrtc:
    @pytest.mark.parametrize(
        "use",
        [u for u in USES if u.spec.name not in SLOW and u.spec.arch in ("sm_80", "sm_90a", "sm_120f")],
        ids=lambda use: str(use.spec),
    )
    def test_compiles(self, use: Use) -> None:
        assert build.compile_spec(use.spec)[:4] == b"\x7fELF"

    def test_a_product_is_compiled_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        spec = next(use.spec for use in USES if use.spec.name == "sm90/grouped_mlp")
        store = Store(tmp_path, 1 << 30)
        code = build.code_of(spec, store)
        assert code[:4] == b"\x7fELF"
        monkeypatch.setattr(build, "compile_spec", lambda spec: pytest.fail("compiled again"))
        assert build.code_of(spec, store) == code

    def test_an_error_has_the_compilers_words(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "common").mkdir()
        (tmp_path / "common" / "bad.cu").write_text('extern "C" __global__ void bad() { nonsense; }')
        monkeypatch.setattr(build, "kernel_path", lambda *parts: tmp_path.joinpath(*parts[2:]))
        with pytest.raises(build.CompileError, match="nonsense"):
            build.compile_spec(Spec.of("common/bad", "sm_90a"))
