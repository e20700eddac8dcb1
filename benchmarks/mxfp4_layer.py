"""One MoE layer of MXFP4 experts: prepared, arranged, with each family of kernels; beside the floor, bf16 and peers.

    PYTHONPATH=. python benchmarks/mxfp4_layer.py --json benchmarks/results/mxfp4_layer.json

Layers: gpt-oss-120b (biases, clamped SwiGLU, gate and up rows interleaved) and Qwen3-30B-A3B, whose bf16 layer is timed
beside it. Blocks are random, made on the GPU. Graphs rotate over weight sets, so that L2 does not hold the weights of
the next call. Nothing is timed unless its output is within the bound of the fp64 oracle. The results are written after
every T. The floor is that of an H200: 4.4 TB/s and 790 TFLOP/s, as moe_layer.py measured; --measure takes this run's.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated, Any

import typer
from command_line import Json, run_script
from layer_run import measure_layers, say
from need_gpu import need_gpu
from peers import MXFP4_PEERS

from ttnn_moe.arranging import arranged
from ttnn_moe.bench.command import points_of
from ttnn_moe.bench.families import OfFamily
from ttnn_moe.bench.floor import Ceilings, measure_ceilings
from ttnn_moe.bench.implementations import Forward, Implementation, Prepared
from ttnn_moe.bench.layer import GPT_OSS, PRESETS, Layer, Weights
from ttnn_moe.bench.measure import Options
from ttnn_moe.contract import Problem
from ttnn_moe.cuda.moe.families import FAMILIES
from ttnn_moe.errors import RequestError
from ttnn_moe.formats.mxfp4 import NAME
from ttnn_moe.formats.mxfp4_boxes import NAME as BOXES

QWEN3 = PRESETS["qwen3-30b-a3b"]
LAYERS = {layer.name: layer for layer in (GPT_OSS, replace(QWEN3, weight_format=NAME))}
BF16 = replace(QWEN3, name=f"{QWEN3.name} bf16")
TOKENS = "1,8,32,128,512,4096"
H200 = Ceilings(4.4e12, 790e12)


def arranged_weights(weights: Weights) -> Weights:
    """Arranged copies, made once."""
    return weights.once("arranged", lambda: Weights(arranged(weights.experts)))


class ArrangedPrepared(Prepared):
    """A prepared layer of arranged experts (`ttnn_moe.arrange`)."""

    row = "prepared, arranged"

    def _problem(self, layer: Layer, T: int) -> Problem:
        return super()._problem(replace(layer, weight_format=BOXES), T)

    def prepare(self, layer: Layer, weights: Weights, T: int) -> Forward:
        return super().prepare(layer, arranged_weights(weights), T)


class ArrangedOfFamily(OfFamily):
    """A family of arranged experts."""

    def why_not(self, layer: Layer, T: int) -> str | None:
        return super().why_not(replace(layer, weight_format=BOXES), T)

    def plan(self, layer: Layer, T: int) -> Any:
        return super().plan(replace(layer, weight_format=BOXES), T)

    def prepare(self, layer: Layer, weights: Weights, T: int) -> Forward:
        return super().prepare(layer, arranged_weights(weights), T)


def implementations(words: str) -> tuple[list[Implementation], dict[str, str]]:
    """A prepared layer, the families of the format, peers; and which peers are not here, with the reason.

    words: only implementations whose names hold one of these, separated by commas.
    """
    families = [OfFamily(family) for family in FAMILIES if family.weight_format == NAME]
    families += [ArrangedOfFamily(family) for family in FAMILIES if family.weight_format == BOXES]
    peers = {peer.name: peer.available("cuda") for peer in MXFP4_PEERS}
    able = [
        Prepared("cuda", "cuda"),
        ArrangedPrepared("cuda", "cuda"),
        *families,
        *(peer for peer in MXFP4_PEERS if peers[peer.name] is None),
    ]
    found = [one for one in able if any(word in one.name for word in words.split(","))]
    if not found:
        raise RequestError("nothing to measure", got=words, expected=f"part of one of {[one.name for one in able]}")
    return found, {name: reason for name, reason in peers.items() if reason is not None}


def main(
    only: Annotated[str, typer.Option(help="Implementations: parts of their names, as in prepared,marlin.")] = "",
    layers: Annotated[str, typer.Option(help=f"Of {', '.join(LAYERS)}.")] = ",".join(LAYERS),
    tokens: Annotated[str, typer.Option(help="Numbers of tokens; with an s: skewed routing.")] = TOKENS,
    experts: Annotated[int | None, typer.Option(help="Measure the layers with this many experts.")] = None,
    bf16: Annotated[bool, typer.Option(help="Also the bf16 layer of Qwen3.")] = True,
    measure: Annotated[bool, typer.Option("--measure", help="Measure the floor's ceilings in this run.")] = False,
    rounds: Annotated[int, typer.Option(help="Samples of a time, at most.")] = 100,
    seconds: Annotated[float, typer.Option(help="About how long the rounds of one T may take.")] = 2.0,
    sets: Annotated[int, typer.Option(help="Weight sets that are rotated; fewer where they do not fit.")] = 4,
    limit: Annotated[float, typer.Option(help="Begin no T after this many seconds.")] = 420.0,
    json_file: Json = None,
) -> None:
    """Measure, write JSON, print tables."""
    need_gpu()
    started = time.monotonic()
    chosen, unavailable = implementations(only)
    options = Options("cuda", rounds, seconds, sets, 0, deadline=started + limit, say=say)
    unknown = [name for name in layers.split(",") if name not in LAYERS]
    if unknown:
        raise RequestError("no such layers", got=unknown, expected=list(LAYERS))
    wanted: list[tuple[Layer, list[Implementation]]] = [(LAYERS[name], chosen) for name in layers.split(",")]
    if bf16 and QWEN3.name in layers.split(","):
        wanted.append((BF16, [Prepared("cuda", "cuda")]))
    ceilings = measure_ceilings("cuda", QWEN3.dtype) if measure else H200
    measured = [(layer if experts is None else replace(layer, E=experts), these) for layer, these in wanted]
    measure_layers(measured, points_of(tokens), ceilings, options, json_file, unavailable=unavailable)


if __name__ == "__main__":
    run_script(main)
