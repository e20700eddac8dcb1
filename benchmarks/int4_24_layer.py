"""One MoE layer of int4_24 experts, prepared and with each family of kernels, beside the floor of its bytes.

    PYTHONPATH=. python benchmarks/int4_24_layer.py --json benchmarks/results/int4_24_layer.json
    TTNN_MOE_CUDA_ARCH=sm_80 PYTHONPATH=. python benchmarks/int4_24_layer.py --family v6

Words are random, made on the GPU. Graphs rotate over weight sets, so that L2 does not hold the words of the next call.
Nothing is timed unless its output is within the bound of the fp64 oracle. The results are written after every T.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated

import typer
from command_line import Json, run_script
from layer_run import measure_layers, say
from need_gpu import need_gpu

from ttnn_moe.bench.command import points_of
from ttnn_moe.bench.families import OfFamily
from ttnn_moe.bench.floor import measure_ceilings
from ttnn_moe.bench.implementations import Implementation, Prepared
from ttnn_moe.bench.layer import PRESETS, Layer
from ttnn_moe.bench.measure import Options
from ttnn_moe.cuda.moe.families import FAMILIES
from ttnn_moe.cuda.moe.int4_24_v6 import INT4_24_V6, V6Plan
from ttnn_moe.errors import RequestError
from ttnn_moe.formats.int4_24 import NAME

LAYERS, TOKENS = "deepseek-v3,qwen3-30b-a3b", "1,8,32,128,512,4096"


def implementations(words: str) -> list[Implementation]:
    """The families of the format whose names hold one of these words, separated by commas.

    "": all of them, behind a prepared layer, which runs what the backend chooses.
    """
    able = [family for family in FAMILIES if family.weight_format == NAME]
    found = [OfFamily(f) for f in able if any(word in f.name for word in words.split(","))]
    if not found:
        raise RequestError("no such family", got=words, expected=f"part of one of {[f.name for f in able]}")
    return found if words else [Prepared("cuda", "cuda"), *found]


class Ahead(OfFamily):
    """v6 with another number of steps whose words are requested ahead."""

    def __init__(self, ahead: int):
        super().__init__(INT4_24_V6, f"{INT4_24_V6.name} ahead {ahead}")
        self.ahead = ahead

    def plan(self, layer: Layer, T: int) -> V6Plan:
        return replace(super().plan(layer, T), ahead=self.ahead)


def main(
    family: Annotated[str, typer.Option(help="Families: parts of their names, as in v6.")] = "",
    ahead: Annotated[str, typer.Option(help="Also v6 with these numbers of steps ahead, as 1,8.")] = "",
    layers: Annotated[str, typer.Option(help=f"Of {', '.join(PRESETS)}.")] = LAYERS,
    tokens: Annotated[str, typer.Option(help="Numbers of tokens; with an s: skewed routing.")] = TOKENS,
    experts: Annotated[int | None, typer.Option(help="Measure the layers with this many experts.")] = None,
    rounds: Annotated[int, typer.Option(help="Samples of a time, at most.")] = 100,
    seconds: Annotated[float, typer.Option(help="About how long the rounds of one T may take.")] = 2.0,
    sets: Annotated[int, typer.Option(help="Weight sets that are rotated; fewer where they do not fit.")] = 4,
    limit: Annotated[float, typer.Option(help="Begin no T after this many seconds.")] = 420.0,
    json_file: Json = None,
) -> None:
    """Measure, write JSON, print tables."""
    need_gpu()
    started = time.monotonic()
    chosen = [*implementations(family), *(Ahead(int(word)) for word in ahead.split(",") if word)]
    options = Options("cuda", rounds, seconds, sets, 0, deadline=started + limit, say=say)
    wanted = [replace(PRESETS[name], weight_format=NAME) for name in layers.split(",")]
    measured = [(layer if experts is None else replace(layer, E=experts), chosen) for layer in wanted]
    measure_layers(measured, points_of(tokens), measure_ceilings("cuda", wanted[0].dtype), options, json_file)


if __name__ == "__main__":
    run_script(main)
