"""One MoE layer with the kernels for compute capability 8.0, on a newer GPU that runs them from PTX (compute_80).

    TTNN_MOE_CUDA_ARCH=sm_80 PYTHONPATH=. python benchmarks/sm80_layer.py --json benchmarks/results/sm80_layer.json

The ceiling of products is a loop of nothing but mma.sync, measured in the same run. Triton's kernels are compiled for
sm_80, too. `--tiles` measures other tiles of the grouped products beside the ones that the plan chooses, for example
"512,2048:2,2,64,6,64,1,1;4,2,160,3,64,1,0". `--beside` adds files of moe_layer.py from the same machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from ctypes import c_int32
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from ttnn_moe.bench import report
from ttnn_moe.bench.command import points_of
from ttnn_moe.bench.families import OfFamily
from ttnn_moe.bench.floor import measure_ceilings
from ttnn_moe.bench.implementations import Forward, ours
from ttnn_moe.bench.layer import PRESETS, Layer, Weights
from ttnn_moe.bench.measure import Options, Result, measure_layer
from ttnn_moe.bench.timing import fastest_us_on_device
from ttnn_moe.cuda.arch import Target, target_of
from ttnn_moe.cuda.device import gpu
from ttnn_moe.cuda.moe import sort
from ttnn_moe.cuda.moe.cuda_cpp import arch_of
from ttnn_moe.cuda.moe.sm80 import SM80, WarpTile
from ttnn_moe.cuda.moe.sorted import SortedPlan
from ttnn_moe.cuda.moe.triton import TRITON, TRITON_FEW

TOKENS = "1,8,32,128,512,2048,4096,16384,4096s"


def tile_name(tile: WarpTile) -> str:
    return "tile " + ",".join(str(int(value)) for value in asdict(tile).values())


def tile_of(text: str) -> WarpTile:
    """From warps_m,warps_n,max_n,stages,k_block,blocks,read_once."""
    values = [int(word) for word in text.split(",")]
    return WarpTile(*values[:6], read_once=bool(values[6]))


class Tile(OfFamily):
    """The grouped products with one tile, whatever the plan would choose."""

    def __init__(self, tile: WarpTile):
        super().__init__(SM80, tile_name(tile))
        self.tile = tile
        self.tokens: set[int] = set()

    def why_not(self, layer: Layer, T: int) -> str | None:
        return None if T in self.tokens else "not asked for"

    def plan(self, layer: Layer, T: int) -> SortedPlan[WarpTile]:
        problem, arch = layer.problem(T, "cuda"), arch_of(self.target())
        return SortedPlan(problem, arch, self.tile, sort.choose(problem, arch))


class TritonSm80(OfFamily):
    """A Triton family with its tiles for capability 8.0, compiled for sm_80; ptxas then makes this GPU's code."""

    def available(self, device: str) -> str | None:
        from triton.backends.nvidia.compiler import CUDABackend

        if os.environ.get("TRITON_OVERRIDE_ARCH") != "sm80":
            os.environ["TRITON_OVERRIDE_ARCH"] = "sm80"
            make = CUDABackend.make_cubin
            here = 10 * torch.cuda.get_device_capability()[0]
            CUDABackend.make_cubin = lambda self, src, metadata, opt, capability: make(self, src, metadata, opt, here)
        return None

    def target(self) -> Target:
        return replace(target_of(), gpu=replace(gpu(), capability=(8, 0)))

    def prepare(self, layer: Layer, weights: Weights, T: int) -> Forward:
        problem = layer.problem(T, "cuda")
        self.family = next(family for family in (TRITON_FEW, TRITON) if family.why_not(problem, self.target()) is None)
        return super().prepare(layer, weights, T)


def product_rates() -> dict[int, float]:
    """Operations a second of mma.sync alone, by warps a multiprocessor: the fastest seen."""
    from cuda.core import Device, LaunchConfig, ObjectCode, Program, ProgramOptions, launch

    from ttnn_moe.cuda.jit import load
    from ttnn_moe.sources import kernel_path

    source = (Path(__file__).parent / "mma_loop.cu").read_text()
    options = ProgramOptions(arch="compute_80", std="c++17", include_path=[str(kernel_path("gpu_kernels", "cuda"))])
    Device(0).set_current()
    code = Program(source, "c++", options).compile("ptx").code
    kernel = ObjectCode.from_ptx(code if isinstance(code, bytes) else bytes(code, "ascii")).get_kernel("mma_loop")
    blocks, steps, rates = torch.cuda.get_device_properties(0).multi_processor_count, 4096, {}
    for warps in (4, 8, 12):
        threads = 32 * warps
        words = torch.randn(24, 2 * threads, device="cuda").bfloat16().view(torch.int32)
        out = torch.full((blocks * threads,), float("nan"), device="cuda")
        config = LaunchConfig(grid=(blocks,), block=threads)

        given = config, kernel, words.data_ptr(), out.data_ptr(), c_int32(steps)
        us = fastest_us_on_device(lambda given=given: launch(load.stream(0), *given))
        assert bool(out.isfinite().all()) and bool((out != 0).any())
        rates[warps] = blocks * warps * steps * 32 * 4096 / us * 1e6
    return rates


def warm(tiles: Sequence[WarpTile]) -> None:
    """Compile tiles in processes of their own: the driver's compilation of PTX takes seconds a kernel."""
    names = [",".join(str(int(value)) for value in asdict(tile).values()) for tile in tiles]
    children = [subprocess.Popen([sys.executable, __file__, "--compile", name]) for name in names]
    for child in children:
        child.wait()


def rows_of(file: Path) -> list[dict[str, Any]]:
    """Our graph rows of Qwen3's layer in a file of moe_layer.py."""
    rows = json.loads(file.read_text())["rows"]
    names = {"implementation": "ttnn_moe cuda prepared", "layer": "qwen3-30b-a3b", "mode": "graph"}
    return [row for row in rows if all(row[key] == name for key, name in names.items())]


def main(
    tokens: Annotated[str, typer.Option(help="Numbers of tokens; with an s: skewed routing.")] = TOKENS,
    tiles: Annotated[str, typer.Option(help="Tiles, as T:tile;tile and so on, separated by spaces.")] = "",
    beside: Annotated[
        str, typer.Option(help="Files of moe_layer.py, as name=file and so on, separated by spaces.")
    ] = "",
    compile: Annotated[str, typer.Option(help="Compile this tile and end.")] = "",
    rounds: Annotated[int, typer.Option(help="Samples of a time, at most.")] = 100,
    seconds: Annotated[float, typer.Option(help="About how long the rounds of one T may take.")] = 3.0,
    limit: Annotated[float, typer.Option(help="Begin no T after this many seconds.")] = 420.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here, after every T.")] = None,
) -> None:
    """Measure, write JSON, print a table."""
    started, layer = time.monotonic(), PRESETS["qwen3-30b-a3b"]
    if compile:
        from ttnn_moe.cuda.moe.cuda_cpp import launches

        torch.zeros(1, device="cuda")
        launches(SM80, Tile(tile_of(compile)).plan(layer, 64), False, False, 0)
        return
    say = Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print
    asked: dict[WarpTile, Tile] = {}
    for part in tiles.split():
        counts, _, names = part.partition(":")
        for tile in map(tile_of, names.split(";")):
            asked.setdefault(tile, Tile(tile)).tokens |= {int(T) for T in counts.split(",")}
    warm(list(asked))
    say(f"compiled after {time.monotonic() - started:.0f} s")
    rates = product_rates()
    say(f"mma.sync TFLOP/s by warps a multiprocessor: { {w: round(r / 1e12, 1) for w, r in rates.items()} }")
    ceilings = replace(measure_ceilings("cuda", layer.dtype), flops_per_s=max(rates.values()))
    say(f"read {ceilings.read_bytes_per_s / 1e12:.3f} TB/s")
    options = Options("cuda", rounds, seconds, 4, 0, deadline=started + limit, say=say)
    result = Result()
    others = {name: rows_of(Path(file)) for name, _, file in (one.partition("=") for one in beside.split())}

    def document() -> dict[str, Any]:
        made = report.document("cuda", ceilings, options, result, {})
        return made | {"arch": "compute_80", "mma_flops_per_s_by_warps": rates, "beside": others}

    def save() -> None:
        if json_file is not None:
            report.write(json_file, document())

    plans = [one for one in ours("cuda") if one.name == "ttnn_moe cuda prepared"]
    peers = [one for one in (TritonSm80(TRITON, "triton sm80"),) if one.available("cuda") is None]
    measure_layer(layer, points_of(tokens), [*plans, *peers, *asked.values()], ceilings, options, result, save)
    save()
    for table in report.tables(document()):
        Console(width=200).print(table)


if __name__ == "__main__":
    typer.run(main)
