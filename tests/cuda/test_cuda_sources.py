"""CUDA C++ sources without a GPU: compiled as for a GPU. The compiler reports registers, spills, shared memory."""

from __future__ import annotations

import io
import itertools
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from ttnn_moe import Problem
from ttnn_moe.activations import CLAMPED_SWIGLU
from ttnn_moe.cuda.arch import ARCHES, HOPPER, Arch, Target
from ttnn_moe.cuda.attention import (
    bucketed,
    bucketed_prompt,
    bucketed_unpack,
    bucketed_write,
    decode_sm90,
    decode_units,
    prefill_sm90,
)
from ttnn_moe.cuda.combine.few import FewCombinePlan, FewDispatchPlan
from ttnn_moe.cuda.combine.node import NodeCombinePlan, NodeDispatchPlan
from ttnn_moe.cuda.combine.rank_combine import Plan
from ttnn_moe.cuda.combine.rank_dispatch import DispatchPlan
from ttnn_moe.cuda.device import H200
from ttnn_moe.cuda.jit import build
from ttnn_moe.cuda.jit.spec import Spec
from ttnn_moe.cuda.jit.store import Store
from ttnn_moe.cuda.linear import decode_linear
from ttnn_moe.cuda.moe.cuda_cpp import CudaCpp
from ttnn_moe.cuda.moe.families import CUDA_CPP, choose
from ttnn_moe.cuda.moe.few import FEW
from ttnn_moe.cuda.moe.mxfp4_few import MXFP4_FEW, MXFP4_FEW_BOXES
from ttnn_moe.cuda.moe.sm80_mxfp4 import MXFP4
from ttnn_moe.cuda.moe.sm90_mxfp4 import MXFP4_BOXES_SM90, MXFP4_SM90
from ttnn_moe.cuda.moe.uses import Use
from ttnn_moe.cuda.parallel import sums
from ttnn_moe.cuda.router import clustered
from ttnn_moe.cuda.sampling import draw_tokens
from ttnn_moe.sources import kernel_path

ROOT = kernel_path("gpu_kernels", "cuda")
E, K = 128, 8
PRODUCTS = ("grouped_mlp",)


def _uses(arch: Arch) -> list[Use]:
    """Every kernel of a GPU, with every size that these tokens can make a plan choose."""
    target, found = Target(H200, arch), set[Use]()
    product = next(family for family in CUDA_CPP if family.name == arch.products)
    for family, tokens in ((FEW, [1]), (product, [1 << i for i in range(18)])):
        for T in tokens:
            for I in (64, 768) if family is FEW else (64,):
                problem = Problem(T, E, K, 64, I)
                found.update(family.uses(family.plan(problem, target), ids64=False, add=False))
        other = Problem(tokens[len(tokens) // 2], E, K, 64, 64, torch.float16, torch.float32)
        found.update(family.uses(family.plan(other, target), ids64=True, add=True))
    return sorted(found, key=lambda use: str(use.spec))


def _int4_24_uses(arch: Arch) -> list[Use]:
    """Of DeepSeek-V3's sizes, with every tile. Sort and combine are compiled for dense weights."""
    target, uses = Target(H200, arch), set[Use]()
    for T in (1, 8, 128, 300, 512, 1000, 2000, 4096):
        problem = Problem(T, 256, K, 7168, 2048, weight_format="int4_24")
        for family in CUDA_CPP:
            if family.why_not(problem, target) is None:
                uses.update(family.uses(family.plan(problem, target), ids64=False, add=False))
    return sorted((use for use in uses if "int4_24" in use.spec.name), key=lambda use: str(use.spec))


def _mxfp4_warp_uses(arch: Arch, *tokens: int) -> list[Use]:
    """Of gpt-oss-120b's sizes. Sort and combine are compiled for dense weights."""
    uses, families = set[Use](), cast("tuple[CudaCpp[Any], ...]", (MXFP4_FEW, MXFP4))
    for T in tokens:
        problem = Problem(T, E, 4, 2880, 2880, weight_format="mxfp4", activation="clamped_swiglu", biased=True)
        family = next(f for f in families if f.why_not(problem, Target(H200, arch)) is None)
        uses.update(family.uses(family.plan(problem, Target(H200, arch)), ids64=False, add=False))
    return sorted((use for use in uses if "mxfp4" in use.spec.name), key=lambda use: str(use.spec))


def _hopper_mxfp4_uses() -> list[Use]:
    """Of gpt-oss's sizes, in both orders of rows; arranged, also of Qwen3's."""
    target, uses = Target(H200, HOPPER), set[Use]()
    for T, order in ((128, "interleaved"), (4096, "interleaved"), (4096, "halves")):
        problem = Problem(T, E, 4, 2880, 2880, weight_format="mxfp4", gate_up_order=order)
        if order == "interleaved":
            problem = replace(problem, activation=CLAMPED_SWIGLU, biased=True)
        uses.update(MXFP4_SM90.uses(MXFP4_SM90.plan(problem, target), ids64=False, add=False))
    gpt_oss = Problem(1, E, 4, 2880, 2880, weight_format="mxfp4_boxes", activation=CLAMPED_SWIGLU, biased=True)
    qwen3 = Problem(1, E, K, 2048, 768, weight_format="mxfp4_boxes")
    boxed = cast("tuple[CudaCpp[Any], ...]", (MXFP4_FEW_BOXES, MXFP4_BOXES_SM90))
    for layer, T in (
        *((gpt_oss, T) for T in (1, 128, 512, 1024, 1536, 2048, 4096)),
        *((qwen3, T) for T in (1, 256, 1024)),
    ):
        problem = replace(layer, T=T)
        family = next(f for f in boxed if f.why_not(problem, target) is None)
        uses.update(family.uses(family.plan(problem, target), ids64=False, add=False))
    return sorted((use for use in uses if "mxfp4" in use.spec.name), key=lambda use: str(use.spec))


def _decode_attention(
    of: decode_sm90.Plan,
    dtype: torch.dtype,
    group: int,
    D: int,
    page: int,
    early: bool,
    beside: bool = False,
    units: bool = False,
) -> Use:
    """beside: a token's key and value lie side by side."""
    ring, stride = of.stages > 1, 2 * D if beside else D
    return Use(
        decode_sm90.spec_of(of, dtype, group, D, stride, page, ring, not early, early, units),
        of.shared_memory(D, group),
    )


ROOM = {arch.name: arch.shared_memory for arch in ARCHES.values()}
# of the other operators of a decoder layer
MODEL = [
    *(
        Use(decode_linear.spec_of(of, dtype, norm, add), of.shared_memory(K, norm))
        for T, N, K, dtype, norm, add in (
            (8, 5120, 2048, torch.bfloat16, True, False),
            (64, 5120, 2048, torch.bfloat16, True, False),
            (96, 5120, 2048, torch.bfloat16, False, False),
            (16, 2048, 4096, torch.float16, False, True),
            (96, 2048, 4096, torch.bfloat16, False, True),
            (160, 5120, 2048, torch.bfloat16, False, False),
            (160, 2048, 4096, torch.bfloat16, False, True),
        )
        if (of := decode_linear.plan(T, N, K, H200.multiprocessors)) is not None
    ),
    *(
        Use(clustered.spec_of(dtype, H, E, K, K == 8, groups, norm), clustered.shared_memory(E, groups))
        for norm in (True, False)
        for dtype, H, E, K, groups in (
            (torch.bfloat16, 2048, 128, 8, 1),
            (torch.bfloat16, 2048, 128, 8, 2),
            (torch.float16, 1024, 256, 16, 2),
            (torch.bfloat16, 4096, 128, 8, 1),
            (torch.float16, 4096, 128, 16, 1),
            (torch.float16, 2048, 256, 8, 1),
        )
    ),
    *(
        Use(draw_tokens.spec_of(arch, dtype, blocks), draw_tokens.shared_memory(blocks))
        for arch, dtype, blocks in (
            ("sm_80", torch.bfloat16, 1),
            ("sm_86", torch.float32, 1),
            ("sm_120f", torch.bfloat16, 1),
            ("sm_90a", torch.float16, 1),
            ("sm_90a", torch.bfloat16, 8),
        )
    ),
    Use(prefill_sm90.spec_of(torch.bfloat16, 0, 8), prefill_sm90.SHARED_MEMORY),
    Use(prefill_sm90.spec_of(torch.bfloat16, 64, 8), prefill_sm90.SHARED_MEMORY),
    Use(prefill_sm90.spec_of(torch.float16, 256, 1), prefill_sm90.SHARED_MEMORY),
    Use(decode_units.SPEC, decode_units.SHARED_MEMORY),
    _decode_attention(decode_sm90.Plan(4, 4, 1), torch.bfloat16, 8, 128, 64, True),
    _decode_attention(decode_sm90.Plan(2, 8, 1), torch.bfloat16, 8, 128, 64, True),
    _decode_attention(decode_sm90.Plan(1, 8, 2), torch.bfloat16, 8, 128, 64, False),
    _decode_attention(decode_sm90.Plan(1, 4, 2), torch.bfloat16, 8, 128, 64, False, beside=True),
    _decode_attention(decode_sm90.Plan(1, 4, 2), torch.bfloat16, 8, 128, 0, True),
    _decode_attention(decode_sm90.Plan(1, 4, 2), torch.bfloat16, 8, 128, 64, True, units=True),
    _decode_attention(decode_sm90.Plan(1, 4, 2), torch.float16, 8, 128, 64, False, units=True),
    _decode_attention(decode_sm90.Plan(8, 4, 4), torch.float16, 1, 64, 16, False),
    _decode_attention(decode_sm90.Plan(8, 4, 4), torch.bfloat16, 16, 128, 64, True),
    _decode_attention(decode_sm90.Plan(8, 4, 2, 4), torch.bfloat16, 8, 128, 64, True),
]
BULK = Plan(1, 2, 7168, 4096, bulk=True)
COMBINE = [
    Use(Plan(1, 2, 7168, 4096).spec("sm_80")),
    Use(BULK.spec("sm_90a"), BULK.shared_memory),
    Use(Plan(2, 4, 2048, 128, bulk=True).spec("sm_90a")),
    Use(Plan(4, 8, 2048, 128, wire=torch.float32).spec("sm_90a")),
    *(
        Use(plan(nodes, 2, 2048, 128, bulk=bulk).spec("sm_90a" if bulk else "sm_80"))
        for plan, nodes in ((DispatchPlan, 2), (NodeDispatchPlan, 1), (NodeCombinePlan, 1))
        for bulk in (False, True)
    ),
    *(
        Use(plan(1, 2, 2048, 8).spec(arch))
        for plan in (FewDispatchPlan, FewCombinePlan)
        for arch in ("sm_80", "sm_90a")
    ),
]
PARALLEL = [
    Use(sums.add_spec("sm_80", torch.float16, 2880, 8)),
    Use(sums.add_spec("sm_90a", torch.bfloat16, 2048, 2)),
    Use(sums.add_many_spec("sm_80", torch.float16, 2880, 8)),
    Use(sums.add_many_spec("sm_90a", torch.bfloat16, 2048, 2)),
    Use(sums.add_many_spec("sm_90a", torch.bfloat16, 2048, 4)),
    Use(sums.gather_spec("sm_80", torch.bfloat16, 3)),
    Use(sums.gather_spec("sm_90a", torch.bfloat16, 2)),
]


def _bucketed_uses(arch: Arch) -> list[Use]:
    """Of a bucketed KV cache: one query a row, and five; with the mass of pages, and without."""
    shapes = [bucketed.Shape(8, n, 32, 4, 64, (4,) * 5) for n in (1, 5)]
    uses = [Use(bucketed.merge_spec(arch.name, True, 8), 0), Use(bucketed.mass_spec(arch.name, shapes[0]), 0)]
    for shape, mass, of in (
        (shapes[0], False, bucketed.Plan(4, 4)),
        (shapes[0], False, bucketed.Plan(8, 4)),
        (shapes[0], True, bucketed.Plan(16, 4)),
        (shapes[1], False, bucketed.Plan(4, 4, 2)),
        (shapes[1], False, bucketed.Plan(8, 4, 2)),
    ):
        uses.append(Use(bucketed.spec_of(arch.name, shape, shape.n > 1, True, mass, of), of.shared_memory))
    uses += [Use(bucketed_write.write_spec(arch.name, norm, 8, 64), 0) for norm in (True, False)]
    uses += [
        Use(bucketed_write.tier_spec(*one), 0) for one in (("stay", arch.name, 16, 64), ("units", arch.name, 8, 64))
    ]
    prompt = bucketed_prompt.spec_of(arch.name, 8, 64, (4,) * 5)
    return [*uses, Use(prompt, bucketed_prompt.SHARED_MEMORY), Use(bucketed_unpack.spec_of(arch.name, 64), 0)]


USES = [
    *MODEL,
    *COMBINE,
    *PARALLEL,
    *(use for arch in dict.fromkeys(ARCHES.values()) for use in _uses(arch)),
    *(use for arch in (ARCHES[8, 0], ARCHES[8, 6], HOPPER) for use in _int4_24_uses(arch)),
    *(use for arch in (ARCHES[8, 0], HOPPER) for use in _bucketed_uses(arch)),
    *_hopper_mxfp4_uses(),
    *_mxfp4_warp_uses(ARCHES[8, 0], 1, 32, 256, 1024, 1536, 2048, 4096),
    *_mxfp4_warp_uses(ARCHES[8, 6], 256, 1024, 4096),
    *_mxfp4_warp_uses(HOPPER, 32),
]


def _same_code(uses: list[Use]) -> list[list[Use]]:
    """Uses by machine code: compute capabilities 8.x have the same instructions."""
    found: dict[object, list[Use]] = defaultdict(list)
    for use in uses:
        found[use.spec.name, use.spec.defines, _arch(use.spec)].append(use)
    return list(found.values())


def _arch(spec: Spec) -> str:
    return re.sub(r"sm_8\d", "8.x", spec.arch)


# Sizes between a smaller and a larger one that are compiled: the source has no branch that these take alone.
BETWEEN = {
    "sm80/bucketed_attention": {"WARPS": (4,)},
    "common/routing_sort": {"THREADS": (256,)},
    "sm80/grouped_mlp": {"MAX_N": (64, 96)},
    "sm80/int4_24_mlp": {"MAX_N": (16, 32)},
    "sm80/mxfp4_few_gate_up": {"HIDDEN": (2048,)},
    "sm80/mxfp4_few_down": {"HIDDEN": (2048,)},
    "sm90/grouped_mlp": {"MAX_N": (64,)},
    "sm90/mxfp4_mlp": {"MAX_N": (48, 80)},
    "sm90/int4_24_mlp": {"MAX_N": (16,)},
}


def _between(spec: Spec) -> bool:
    given = dict(spec.defines)
    middle = BETWEEN.get(spec.name, {})
    return given.get("FP16") != "1" and any(int(given[size]) in values for size, values in middle.items())


def _compiled() -> list[Any]:
    """Parameters: a use is `long` where another is the same code with as many registers or more.

    READ_ONCE changes a cache policy only; the tile of 176 columns of sm90/grouped_mlp is that of 160 and more; of
    tiles compiled for an 8.x, another architecture shows all in the widest ones; and compute capability 12.0 takes one
    of each kernel that 8.x takes.
    """
    groups = _same_code(USES)
    every = {(spec.name, _arch(spec), spec.defines) for group in groups for spec in (group[0].spec,)}
    older = {(name, defines) for name, arch, defines in every if arch == "8.x"}
    wide = {(name, arch) for name, arch, defines in every if int(dict(defines).get("MAX_N", 0)) >= 96}
    params, seen = [], set[tuple[str, str]]()
    for group in groups:
        spec, arch = group[0].spec, _arch(group[0].spec)
        given = dict(spec.defines)
        twin = tuple((name, "0" if name == "READ_ONCE" else value) for name, value in spec.defines)
        again = given.get("READ_ONCE") == "1" and (spec.name, arch, twin) in every
        again |= spec.name == "sm90/grouped_mlp" and given["MAX_N"] == "160"
        narrow = (spec.name, arch) in wide and int(given["MAX_N"]) < 96
        again |= arch != "8.x" and (spec.name, spec.defines) in older and narrow
        again |= _between(spec) or arch == "sm_120f" and (spec.name, arch) in seen
        if not again:
            seen.add((spec.name, arch))
        params.append(pytest.param(group, marks=[pytest.mark.long] * again))
    return params


def _compile(spec: Spec) -> tuple[bytes, str]:
    """Machine code, and the compiler's report."""
    core, report = build.cuda_core(), io.StringIO()
    options = core.ProgramOptions(**build.options(spec), ptxas_options="-v")
    code = core.Program((ROOT / f"{spec.name}.cu").read_text(), "c++", options).compile("cubin", logs=report).code
    return code, report.getvalue()


def test_no_lambda_takes_any_type() -> None:
    """NVRTC 13.0 takes such a lambda within another for a function of the host; later ones do not."""
    for path in ROOT.rglob("*.cu*"):
        assert not re.search(r"\][^;{]*\([^)]*\bauto\b[^)]*\) *\{", path.read_text()), path


def test_what_lets_its_successor_start_waits_for_its_predecessor() -> None:
    """Else kernels after it run while those before it do. The emulator runs one kernel after the other."""
    texts = {path: path.read_text() for path in ROOT.rglob("*.cu")}
    lets = {path for path, text in texts.items() if "let_successor_start();" in text}
    assert lets and not [path.name for path in lets if "wait_for_predecessor();" not in texts[path]]


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


def test_attention_to_packed_tiers_is_cut_as_compiled() -> None:
    """No plan takes other warps or tiles than those that are compiled below, and that do not spill."""
    given = [dict(use.spec.defines) for use in USES if use.spec.entry == "bucketed_attention"]
    compiled = {(int(of["WARPS"]), int(of["QT"])) for of in given}
    for T, n, pages in itertools.product((1, 8, 32, 200), (1, 2, 4, 8), (1, 8, 500, 8192)):
        for room in (99 << 10, 227 << 10):
            of = bucketed.plan(bucketed.Shape(T, n, 32, 4, 64, (pages,) * 5), 132, room)
            assert (of.warps, of.tiles) in compiled


@pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
class TestNvrtc:
    @pytest.mark.slow(1.5)
    @pytest.mark.parametrize("uses", _compiled(), ids=lambda uses: str(uses[0].spec))
    def test_compiles_without_spills(self, uses: list[Use]) -> None:
        spec = uses[0].spec
        code, report = _compile(spec)
        assert code[:4] == b"\x7fELF" and "warning" not in report, report
        # mxfp4_mlp's gather warps spill some rows' places, the others what a stage or an item needs once, which costs
        # less than shared memory does
        frame, rows = int(re.findall(r"(\d+) bytes stack frame", report)[0]), int(dict(spec.defines).get("MAX_N", 0))
        spills = {"mxfp4_mlp": 80 if rows > 64 else 0, "mxfp4_many": 64 if rows > 32 else 0, "int4_24_many": 8}
        assert frame <= spills.get(spec.entry, 0), report
        assert frame or "0 bytes spill stores, 0 bytes spill loads" in report, report
        assert "wgmma" not in report, f"the compiler puts products one after the other: {report}"
        registers = int(re.findall(r"Used (\d+) registers", report)[0])
        static = int((re.findall(r"(\d+) bytes smem", report) or ["0"])[0])
        limits = {"routing_sort": 64, "combine": 112, "few_gate_up": 64, "few_down": 128, "sm80/grouped_mlp": 255}
        said = re.search(r"at most (\d+) registers", (ROOT / f"{spec.name}.cu").read_text())
        assert registers <= (int(said[1]) if said else limits.get(spec.name, limits.get(spec.entry, 168)))
        assert all(use.shared_memory + static <= ROOM[use.spec.arch] for use in uses)

    @pytest.mark.parametrize("arch", ARCHES.values(), ids=lambda arch: arch.name)
    def test_a_kernel_is_compiled_once(self, arch: Arch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        spec = next(use.spec for use in USES if use.spec.arch == arch.name and use.spec.entry == "combine")
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
