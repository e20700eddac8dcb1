"""The family of MXFP4 experts on compute capability 12.x without a GPU: plans, machine code, what is compiled when."""

from __future__ import annotations

import importlib.util
import multiprocessing
import re
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from machine_code import NVCC, nvcc
from sm120_cases import packed
from ttnn_moe import ContractError, Problem
from ttnn_moe.activations import CLAMPED_SWIGLU
from ttnn_moe.cuda.arch import ARCHES, HOPPER, Target
from ttnn_moe.cuda.device import H200
from ttnn_moe.cuda.jit import build
from ttnn_moe.cuda.jit.store import Store
from ttnn_moe.cuda.moe.families import CUDA_CPP, choose
from ttnn_moe.cuda.moe.mxfp4_tiles import TILES, Tile, select_tile_m
from ttnn_moe.cuda.moe.prepared import bytes_of
from ttnn_moe.cuda.moe.sm120_mxfp4 import FP4_ACTIVATIONS, SM120_FP4, SM120_MXFP4, tile_named
from ttnn_moe.cuda.moe.uses import Use
from ttnn_moe.cuda.moe.warmup import specs_of
from ttnn_moe.sources import kernel_path

SM120 = ARCHES[12, 0]
TARGET = Target(replace(H200, capability=(12, 0), shared_memory=SM120.shared_memory), SM120)
QWEN3 = Problem(1, 128, 8, 2048, 768, weight_format="mxfp4")
GPT_OSS = Problem(1, 32, 4, 2880, 2880, weight_format="mxfp4", activation=CLAMPED_SWIGLU, biased=True)


@pytest.mark.parametrize("sizes", [QWEN3, GPT_OSS], ids=["qwen3", "gpt_oss"])
def test_the_tokens_alone_choose_a_tile(sizes: Problem) -> None:
    rooms = []
    for T in (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 4096, 65536):
        problem = replace(sizes, T=T)
        chosen = choose(problem, TARGET)
        assert not isinstance(chosen, str) and chosen.family is SM120_MXFP4
        assert chosen.plan.tile.M == select_tile_m(T) and chosen.plan.tile.fused
        rooms.append(bytes_of(chosen.scratch))
        for tile in SM120_MXFP4.candidates(SM120):  # what `bench --tune` may choose needs no more
            assert bytes_of(SM120_MXFP4.scratch(SM120_MXFP4.plan_of(problem, SM120, tile))) <= rooms[-1]
    assert rooms == sorted(rooms)


@pytest.mark.parametrize("arch", [arch for arch in dict.fromkeys(ARCHES.values()) if arch is not SM120], ids=str)
def test_other_architectures_are_refused(arch: object) -> None:
    reason = SM120_MXFP4.why_not(QWEN3, Target(H200, arch))  # type: ignore[arg-type]
    assert reason is not None and "compute capability 12.x, not of sm_" in reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight_format": "dense"}, "mxfp4 weights, not 'dense'"),
        ({"dtype": torch.float16, "out_dtype": None}, "multiplies bf16"),
        ({"H": 80}, "multiples of 32, not 80"),
        ({"K": 17}, "K up to 16"),
    ],
)
def test_other_problems_are_refused(change: dict[str, object], words: str) -> None:
    reason = SM120_MXFP4.why_not(replace(QWEN3, **change), TARGET)  # type: ignore[arg-type]
    assert reason is not None and words in reason


def test_fp4_activations_must_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FP4_ACTIVATIONS, raising=False)
    assert f"{FP4_ACTIVATIONS}=1" in str(SM120_FP4.why_not(QWEN3, TARGET))
    monkeypatch.setenv(FP4_ACTIVATIONS, "1")
    chosen = choose(QWEN3, TARGET)
    assert not isinstance(chosen, str) and chosen.family is SM120_FP4 and chosen.plan.tile.packed
    assert SM120_FP4.operands == "mxfp4" and SM120_MXFP4.operands == "mxfp8"


@pytest.mark.parametrize("tile", [*TILES, *map(packed, TILES)], ids=str)
def test_shared_memory_is_within_the_model(tile: Tile) -> None:
    """Two blocks of scales a stage less than CUTLASS takes, and no epilogue: see mxfp4_tiles.py."""
    assert tile.stages >= 2
    assert tile.shared_memory <= tile.epilogue_bytes + tile.stages * tile.stage_bytes <= SM120.shared_memory
    assert tile.threads >= max(tile.M, tile.N) and tile.threads in (128, 256)


@pytest.mark.parametrize(
    ("text", "tile"), [("8", Tile(8, 64)), ("8x128", Tile(8, 128)), (" 128 ", Tile(128, 128)), ("256", Tile(256, 64))]
)
def test_a_tile_has_a_name(text: str, tile: Tile) -> None:
    assert tile_named(text) == tile


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("128x256", "needs 108576 bytes.*N of .*128.* for M 128"),
        ("512", "bytes"),
        ("48x64", "another form.*M of "),
        ("eight", "no tile"),
        ("8x", "no"),
    ],
)
def test_a_tile_that_cannot_run_is_refused(text: str, words: str) -> None:
    with pytest.raises(ContractError, match=words):
        tile_named(text)


def _specs(*tiles: str, activation: str = "silu") -> list[str]:
    sizes = 128, 8, 2048, 768, torch.bfloat16, SM120, "mxfp4", activation
    return [str(spec) for spec in specs_of([1], *sizes, tiles)]


def test_each_tile_is_a_kernel_of_its_own() -> None:
    of = {tile: {spec for spec in _specs(tile) if "product" in spec} for tile in ("8", "16", "32", "128", "8x128")}
    assert all(len(found) == 1 for found in of.values()) and len(set.union(*of.values())) == 5
    assert sum("product" in spec for spec in _specs(*of)) == 5
    assert _specs("8", activation=CLAMPED_SWIGLU) != _specs("8")
    with pytest.raises(ContractError, match="no tiles to name"):
        specs_of([1], 128, 8, 2048, 768, torch.bfloat16, HOPPER, "int4_24", tiles=["8"])


def _compile_in_a_race(where: str, log: str, start: float) -> None:
    spec = next(use.spec for use in product_uses() if use.spec.entry == "mxfp4_product")
    compile_spec = build.compile_spec

    def counted(spec: object) -> bytes:
        with open(log, "a") as file:
            file.write("compiled\n")
        return compile_spec(spec)  # type: ignore[arg-type]

    build.compile_spec = counted  # type: ignore[assignment]
    time.sleep(max(0.0, start - time.time()))
    assert build.code_of(spec, Store(Path(where), 1 << 26))[:4] == b"\x7fELF"


@pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
def test_eight_processes_that_race_compile_a_tile_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    log, start = tmp_path / "log", time.time() + 0.5
    given = str(tmp_path / "store"), str(log), start
    workers = [context.Process(target=_compile_in_a_race, args=given) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * 8 and log.read_text() == "compiled\n"


def product_uses() -> list[Use]:
    """Every kernel that only this family has: all tiles; biased SwiGLU and FP4 by FP4 of some."""
    uses: dict[Use, None] = {}
    for problem, tiles in ((QWEN3, [*TILES, packed(Tile(8, 64)), packed(Tile(64, 128))]), (GPT_OSS, [Tile(8, 64)])):
        for tile in tiles:
            family = SM120_FP4 if tile.packed else SM120_MXFP4
            for use in family.uses(family.plan_of(problem, SM120, tile), ids64=False, add=False):
                if use.spec.name.startswith("sm120/"):
                    uses[use] = None
    return sorted(uses, key=lambda use: str(use.spec))


def test_no_other_source_is_in_the_folder() -> None:
    names = {path.stem for path in kernel_path("gpu_kernels", "cuda", "sm120").glob("*.cu")}
    assert names == {use.spec.entry for use in product_uses()}
    assert {family.name for family in CUDA_CPP} >= {"sm120_mxfp4", "sm120_fp4"}


def _machine_code(cubin: Path) -> str | None:
    """By cuobjdump, which Triton's package has; None: it is not here."""
    found = importlib.util.find_spec("triton")
    own = None if found is None or found.origin is None else Path(found.origin).parent / "backends/nvidia/bin/cuobjdump"
    tool = str(own) if own is not None and own.exists() else shutil.which("cuobjdump")
    if tool is None:
        return None
    return subprocess.run([tool, "-sass", str(cubin)], capture_output=True, text=True, check=True, timeout=60).stdout


# Tiles between a smaller and a larger one that are compiled, in the same orientation.
BETWEEN = {(128, 64), (64, 128), (128, 32), (32, 128), (32, 64), (64, 32)}


def _compiled() -> list[Any]:
    """Parameters: every use, those of BETWEEN with --long alone."""
    params = []
    for use in product_uses():
        given = dict(use.spec.defines)
        tile = int(given.get("TILE_M", 0)), int(given.get("TILE_N", 0))
        again = tile in BETWEEN and given["PACKED"] == "0"
        params.append(pytest.param(use, marks=[pytest.mark.long] * again))
    return params


@pytest.mark.slow(2)
@pytest.mark.skipif(NVCC is None, reason="nvcc is not installed")
@pytest.mark.parametrize("use", _compiled(), ids=lambda use: str(use.spec))
def test_nvcc_compiles_it_for_sm_120f(use: Use, tmp_path: Path) -> None:
    """Without spills; of small tiles also the machine code: as many block-scaled products as a warp makes of a stage.

    cuobjdump takes longer than nvcc, and large tiles have the same instructions, more often.
    """
    spec, cubin = use.spec, tmp_path / "kernel.cubin"
    assert spec.arch == "sm_120f"
    done = nvcc(spec, cubin, "-Xptxas", "-v", "-Werror", "all-warnings")
    report = done.stderr + done.stdout
    assert done.returncode == 0, report
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report, report
    defines = dict(spec.defines)
    if spec.entry != "mxfp4_product":
        assert int(re.findall(r"Used (\d+) registers", report)[0]) <= 48
        return
    tile = Tile(int(defines["TILE_M"]), int(defines["TILE_N"]), defines["PACKED"] == "1")
    static = int((re.findall(r"(\d+) bytes smem", report) or ["0"])[0])
    assert use.shared_memory == tile.shared_memory and tile.shared_memory + static <= SM120.shared_memory
    assert int(re.findall(r"Used (\d+) registers", report)[0]) * tile.threads <= 65536
    code = _machine_code(cubin) if tile.M * tile.N <= 2048 or tile.packed else None
    if code is None:
        return
    operands = "E2M1.E2M1" if tile.packed else "E2M1.E4M3" if tile.swapped else "E4M3.E2M1"
    products = re.findall(rf"[QO]MMA\.SF\.\w+\.F32\.{operands}\.E8", code)
    of_a_stage = tile.M * tile.N // (tile.threads // 32) // 128 * (2 if tile.packed else 4)
    assert len(products) == of_a_stage and len(re.findall(r"[A-Z]MMA\.", code)) == of_a_stage
    assert ("LDSM.U4x16P64TO8" in code) == (not tile.packed)
    assert not re.search(r"\b(LDL|STL)\b", code), "local memory"
