"""CUDA C++ sources without a GPU: compiled by nvcc (registers, spills, shared memory) and by NVRTC."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from ttnn_moe import Problem
from ttnn_moe.cuda.arch import ARCHES, HOPPER, Arch, Target
from ttnn_moe.cuda.attention import bucketed, prefill_sm90
from ttnn_moe.cuda.device import H200
from ttnn_moe.cuda.jit import build
from ttnn_moe.cuda.jit.spec import Spec
from ttnn_moe.cuda.jit.store import Store
from ttnn_moe.cuda.linear import decode_linear
from ttnn_moe.cuda.moe.families import CUDA_CPP, choose
from ttnn_moe.cuda.moe.few import FEW
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


def _bucketed_uses(arch: Arch) -> list[Use]:
    """Of a bucketed KV cache: one query a row, and five; with the mass of pages, and without."""
    shapes = [bucketed.Shape(8, n, 32, 4, 64, (4,) * 5) for n in (1, 5)]
    uses = [Use(bucketed.merge_spec(arch.name, True), 0), Use(bucketed.mass_spec(arch.name, shapes[0]), 0)]
    for shape, mass, of in (
        (shapes[0], False, bucketed.Plan(4, 4)),
        (shapes[0], True, bucketed.Plan(16, 4)),
        (shapes[1], False, bucketed.Plan(4, 4, 2)),
    ):
        uses.append(Use(bucketed.spec_of(arch.name, shape, shape.n > 1, True, mass, of), of.shared_memory))
    return uses


USES = [
    *MODEL,
    *(use for arch in dict.fromkeys(ARCHES.values()) for use in _uses(arch)),
    *(use for arch in (ARCHES[8, 0], HOPPER) for use in (*_int4_24_uses(arch), *_bucketed_uses(arch))),
]


def test_every_source_is_a_kernel_that_some_plan_uses() -> None:
    names = {path.relative_to(ROOT).with_suffix("").as_posix() for path in ROOT.rglob("*.cu")}
    assert names == {use.spec.name for use in USES}


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
        [u for u in USES if u.spec.name != "sm90/grouped_mlp" and u.spec.arch in ("sm_80", "sm_90a", "sm_120f")],
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
