"""One MoE layer with the kernels for compute capability 8.0, on a newer GPU that runs them from PTX (compute_80).

    TTNN_MOE_CUDA_ARCH=sm_80 PYTHONPATH=. python benchmarks/sm80_layer.py --json benchmarks/results/sm80_layer.json

The ceiling of products is a loop of nothing but mma.sync, measured in the same run. Triton's kernels are compiled for
sm_80, too: ours, and vLLM's where it can be imported. `--tiles` measures other tiles of the grouped products beside
the ones that the plan chooses, for example "512,2048:2,2,64,6,64,1,1;4,2,160,3,64,1,0". `--beside` adds files of
moe_layer.py from the same machine.
"""

from __future__ import annotations

import json
import time
from ctypes import c_int32
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from command_line import Json, run_script
from layer_run import measure_layers, say
from need_gpu import need_gpu
from older_arch import compile_for
from peers.vllm_fused_experts import Vllm

from ttnn_moe.bench.command import points_of
from ttnn_moe.bench.families import OfFamily
from ttnn_moe.bench.floor import measure_ceilings
from ttnn_moe.bench.implementations import Forward, ours
from ttnn_moe.bench.layer import PRESETS, Layer, Weights
from ttnn_moe.bench.measure import Options
from ttnn_moe.bench.timing import fastest_us_on_device
from ttnn_moe.bench.tune import WithTile, compile_all
from ttnn_moe.cuda.moe.sm80 import SM80, WarpTile
from ttnn_moe.cuda.moe.triton import TRITON, TRITON_FEW

TOKENS = "1,8,32,128,512,2048,4096,16384,4096s"


def tile_of(text: str) -> WarpTile:
    """From warps_m,warps_n,max_n,stages,k_block,blocks,read_once."""
    values = [int(word) for word in text.split(",")]
    return WarpTile(*values[:6], read_once=bool(values[6]))


class TritonSm80(OfFamily):
    """A Triton family with its tiles for capability 8.0, compiled for sm_80; ptxas then makes this GPU's code."""

    def available(self, device: str) -> str | None:
        compile_for((8, 0))
        return None

    def prepare(self, layer: Layer, weights: Weights, T: int) -> Forward:
        problem = layer.problem(T, "cuda")
        family = next(family for family in (TRITON_FEW, TRITON) if family.why_not(problem, self.target()) is None)
        return OfFamily(family).prepare(layer, weights, T)


class VllmSm80(Vllm):
    """vLLM's Triton experts compiled for sm_80, with the configuration that it takes on an A100."""

    name = "vllm sm80"

    def available(self, device: str) -> str | None:
        reason = super().available(device)
        if reason is None:
            from vllm.platforms import current_platform

            compile_for((8, 0))
            type(current_platform).get_device_name = lambda *_: "NVIDIA A100-SXM4-80GB"
        return reason


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
    rounds: Annotated[int, typer.Option(help="Samples of a time, at most.")] = 100,
    seconds: Annotated[float, typer.Option(help="About how long the rounds of one T may take.")] = 3.0,
    limit: Annotated[float, typer.Option(help="Begin no T after this many seconds.")] = 420.0,
    json_file: Json = None,
) -> None:
    """Measure, write JSON, print a table."""
    need_gpu()
    started, layer = time.monotonic(), PRESETS["qwen3-30b-a3b"]
    asked: dict[WarpTile, WithTile] = {}
    for part in tiles.split():
        counts, _, names = part.partition(":")
        for tile in map(tile_of, names.split(";")):
            asked.setdefault(tile, WithTile(SM80, tile, ())).tokens |= {int(T) for T in counts.split(",")}
    compile_all(layer, list(asked.values()))
    say(f"compiled after {time.monotonic() - started:.0f} s")
    rates = product_rates()
    say(f"mma.sync TFLOP/s by warps a multiprocessor: { {w: round(r / 1e12, 1) for w, r in rates.items()} }")
    ceilings = replace(measure_ceilings("cuda", layer.dtype), flops_per_s=max(rates.values()))
    options = Options("cuda", rounds, seconds, 4, 0, deadline=started + limit, say=say)
    others = {name: rows_of(Path(file)) for name, _, file in (one.partition("=") for one in beside.split())}
    plans = [one for one in ours("cuda") if one.name == "ttnn_moe cuda prepared"]
    peers = [one for one in (TritonSm80(TRITON, "triton sm80"), VllmSm80()) if one.available("cuda") is None]
    more = {"arch": "compute_80", "mma_flops_per_s_by_warps": rates, "beside": others}
    wanted = [(layer, [*plans, *peers, *asked.values()])]
    measure_layers(wanted, points_of(tokens), ceilings, options, json_file, more=more)


if __name__ == "__main__":
    run_script(main)
