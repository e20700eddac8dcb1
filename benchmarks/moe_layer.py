"""One MoE layer of real models, on our backends and on every peer that can be imported, beside the floor.

    PYTHONPATH=. python benchmarks/moe_layer.py --json benchmarks/results/moe_layer.json
    python benchmarks/tables.py; python benchmarks/plot.py

The results are written after every T: a run that is cut short keeps what it has. Qwen3's layer comes first.
docs/benchmark.md says what is measured, and how.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated

import typer
from command_line import Json, run_script
from layer_run import measure_layers, say
from peers import PEERS

from ttnn_moe.arguments import FLOATS
from ttnn_moe.bench.command import points_of
from ttnn_moe.bench.floor import measure_ceilings
from ttnn_moe.bench.implementations import Implementation, device_of, ours
from ttnn_moe.bench.layer import PRESETS
from ttnn_moe.bench.measure import Options
from ttnn_moe.errors import RequestError

DTYPES = ("bf16", "fp16", "fp32")
TOKENS = "1,8,32,128,512,2048,4096,16384,4096s"


def main(
    layers: Annotated[str, typer.Option(help=f"Of {', '.join(PRESETS)}.")] = ",".join(PRESETS),
    tokens: Annotated[str, typer.Option(help="Numbers of tokens; with an s: skewed routing.")] = TOKENS,
    only: Annotated[str, typer.Option(help="Implementations whose names contain one of these words.")] = "",
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    experts: Annotated[int | None, typer.Option(help="Measure the layers with fewer experts.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda where it is.")] = None,
    rounds: Annotated[int, typer.Option(help="Samples of a time, at most.")] = 100,
    seconds: Annotated[float, typer.Option(help="About how long the rounds of one T may take.")] = 3.0,
    sets: Annotated[int, typer.Option(help="Weight sets that are rotated; fewer where they do not fit.")] = 4,
    seed: Annotated[int, typer.Option(help="Of weights and draws.")] = 0,
    limit: Annotated[float, typer.Option(help="Begin no T after this many seconds.")] = 420.0,
    json_file: Json = None,
) -> None:
    """Measure, write JSON, print tables."""
    started = time.monotonic()
    unknown = [name for name in layers.split(",") if name not in PRESETS]
    if unknown or dtype not in DTYPES or rounds < 1 or sets < 1:
        raise RequestError(
            "cannot measure this",
            got=f"layers {layers}, dtype {dtype}, rounds {rounds}, sets {sets}",
            expected=f"layers of {list(PRESETS)}, a dtype of {list(DTYPES)}, rounds and sets from 1 on",
        )
    device = device_of(device, "auto")
    points = points_of(tokens)
    options = Options(device, rounds, seconds, sets, seed, cut_experts=True, deadline=started + limit, say=say)
    chosen, unavailable = _implementations(device, only)
    wanted = []
    for name in layers.split(","):
        layer = replace(PRESETS[name], dtype=FLOATS[dtype])
        if experts is not None:
            layer = replace(layer, E=experts, K=min(layer.K, experts))
        wanted.append((layer, chosen))
    measure_layers(wanted, points, measure_ceilings(device, FLOATS[dtype]), options, json_file, unavailable=unavailable)


def _implementations(device: str, only: str) -> tuple[list[Implementation], dict[str, str]]:
    """Those to measure, and those that are not here, with the reason."""
    words = [word for word in only.split(",") if word]
    chosen: list[Implementation] = []
    unavailable: dict[str, str] = {}
    for implementation in [*ours(device), *PEERS]:
        if words and not any(word in implementation.name for word in words):
            continue
        reason = implementation.available(device)
        if reason is None:
            chosen.append(implementation)
        else:
            unavailable[implementation.name] = reason
    if not chosen:
        here = [one.name for one in [*ours(device), *PEERS]]
        details = [f"{name}: {reason}" for name, reason in unavailable.items()]
        raise RequestError("nothing to measure", got=f"--only {only}", expected=f"part of {here}", details=details)
    return chosen, unavailable


if __name__ == "__main__":
    run_script(main)
