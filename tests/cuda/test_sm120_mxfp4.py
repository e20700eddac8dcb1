"""The family of MXFP4 experts on compute capability 12.x without a GPU: plans, machine code, what is compiled when."""

from __future__ import annotations

import importlib.util
import multiprocessing
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cuda_gpus import gpu_of, pretend
from machine_code import NVCC, nvcc
from sm120_cases import packed
from ttnn_moe import ContractError, Problem
from ttnn_moe.activations import CLAMPED_SWIGLU
from ttnn_moe.cuda.arch import ARCHES, HOPPER, Target
from ttnn_moe.cuda.device import H200
from ttnn_moe.cuda.jit import build
from ttnn_moe.cuda.jit.store import Store
from ttnn_moe.cuda.moe import tuned, warmup
from ttnn_moe.cuda.moe.families import CUDA_CPP, choose
from ttnn_moe.cuda.moe.mxfp4_activations import ENV
from ttnn_moe.cuda.moe.mxfp4_tiles import TILES, TILES_M, Tile, select_tile_m
from ttnn_moe.cuda.moe.prepared import bytes_of, most_bytes
from ttnn_moe.cuda.moe.sm120_mxfp4 import SM120_FP4, SM120_MXFP4, tile_named
from ttnn_moe.cuda.moe.uses import Use
from ttnn_moe.cuda.moe.warmup import sizes_up_to, specs_of
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
        for tile in SM120_MXFP4.candidates(SM120):  # what `bench --tune` may choose needs no more, if it is fused
            room = bytes_of(SM120_MXFP4.scratch(SM120_MXFP4.plan_of(problem, SM120, tile)))
            assert (room <= rooms[-1]) == tile.fused
    assert rooms == sorted(rooms)


@pytest.fixture
def _own_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TTNN_MOE_CACHE_DIR", str(tmp_path))
    tuned._entries.cache_clear()
    yield
    tuned._entries.cache_clear()


@pytest.mark.usefixtures("_own_tiles")
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_that_was_tuned_is_chosen_and_has_its_scratch(tile: Tile) -> None:
    assert tuned.keep(TARGET, [(replace(GPT_OSS, T=64), tile)]) is not None
    plans = {T: SM120_MXFP4.plan(replace(GPT_OSS, T=T), TARGET) for T in (1, 128, 129)}
    assert [plan.tile for plan in plans.values()] == [Tile(8, 64), tile, Tile(256, 64)]
    most = most_bytes(replace(GPT_OSS, T=129), TARGET)
    rooms = [bytes_of(SM120_MXFP4.scratch(plan)) for plan in plans.values()]
    assert rooms == sorted(rooms) and rooms[-1] <= most, "a layer prepared for more tokens holds calls of fewer"


@pytest.mark.usefixtures("_own_tiles")
def test_tuned_tiles_of_the_gpu_that_is_here_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    here, tile = gpu_of((12, 0)), {"TILE_M": "64", "TILE_N": "8"}
    pretend(monkeypatch, here)
    monkeypatch.setattr(warmup, "gpus", lambda: [here])
    tuned.keep(Target(here, SM120), [(replace(QWEN3, T=64), Tile(64, 8))])
    sizes = 128, 8, 2048, 768, torch.bfloat16
    for arch, found in ((SM120, True), (HOPPER, False)):
        specs = specs_of([64], *sizes, arch, "mxfp4")
        assert any(tile.items() <= dict(spec.defines).items() for spec in specs) == found


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


def _name(problem: Problem, target: Target) -> str:
    chosen = choose(problem, target)
    return chosen if isinstance(chosen, str) else chosen.family.name


@pytest.mark.parametrize(
    ("asked", "few", "many"),
    [
        (None, "sm120_mxfp4", "sm120_mxfp4"),
        ("", "sm120_mxfp4", "sm120_mxfp4"),
        ("mxfp8", "sm120_mxfp4", "sm120_mxfp4"),
        ("mxfp4", "sm120_fp4", "sm120_fp4"),
        ("bf16", "mxfp4_few", "mxfp4"),
    ],
)
def test_activations_that_are_asked_for(
    asked: str | None, few: str, many: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENV, raising=False)
    assert f"{ENV}=mxfp4" in str(SM120_FP4.why_not(QWEN3, TARGET))
    if asked is not None:
        monkeypatch.setenv(ENV, asked)
    assert [_name(replace(QWEN3, T=T), TARGET) for T in (1, 512)] == [few, many]
    for arch, name in ((HOPPER, "mxfp4_sm90"), (ARCHES[8, 0], "mxfp4")):
        said = _name(replace(QWEN3, T=512), Target(H200, arch))
        if asked in ("mxfp4", "mxfp8"):
            assert f"it reads bf16 activations, and {ENV} asks for {asked}" in said
        else:
            assert said == name


def test_activations_of_no_format_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, "fp8")
    with pytest.raises(ContractError, match=f"{ENV} names no format; got 'fp8'; expected .*'bf16'.*unset"):
        choose(QWEN3, TARGET)


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


@pytest.mark.parametrize("text", ["128x256", "256x128"])
def test_a_tile_of_fp4_that_would_fit_is_refused_with_the_reason(text: str) -> None:
    with pytest.raises(ContractError, match=r"needs \d+ bytes.* a block has 101376; FP4 tiles have the sizes of MXFP8"):
        tile_named(text, packed=True)


def _specs(*tiles: str, activation: str = "silu", tokens: Iterable[int] = (1,)) -> list[str]:
    sizes = 128, 8, 2048, 768, torch.bfloat16, SM120, "mxfp4", activation
    return [str(spec) for spec in specs_of(tokens, *sizes, tiles)]


def test_what_is_compiled_ahead_has_every_kernel_of_every_call() -> None:
    """warmup without tokens: tiles of each M, and each form of the sort."""
    ahead = set(_specs(tokens=sizes_up_to(16384)))
    named = set(_specs(*map(str, TILES_M)))
    assert {spec for spec in named if "product" in spec} == {spec for spec in ahead if "product" in spec}
    assert sum("product" in spec for spec in ahead) == len(TILES_M) == 6
    assert ahead >= set(_specs(tokens=(7, 10, 33, 70, 200, 1000, 3000, 16383)))


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
