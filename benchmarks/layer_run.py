"""What the benchmarks of one layer share: lines of progress, a JSON after every T, tables at the end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ttnn_moe.bench import report
from ttnn_moe.bench.floor import Ceilings
from ttnn_moe.bench.implementations import Implementation
from ttnn_moe.bench.layer import Layer
from ttnn_moe.bench.measure import Options, Point, Result, measure_layer

say = Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print
"""A line of progress, to stderr."""


def measure_layers(
    wanted: Iterable[tuple[Layer, Sequence[Implementation]]],
    points: Sequence[Point],
    ceilings: Ceilings,
    options: Options,
    file: Path | None,
    unavailable: Mapping[str, str] | None = None,
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure each layer with its implementations, and print tables. Returns the results as plain values.

    Args:
        file: JSON, written after every T; None: none.
        unavailable: implementations that are not here, and why. more: what the results hold beside the times.
    """
    result, began = Result(), time.monotonic()
    say(f"floor: {ceilings.read_bytes_per_s / 1e12:.3f} TB/s, {ceilings.flops_per_s / 1e12:.1f} TFLOP/s")

    def document() -> dict[str, Any]:
        made = report.document(options.device, ceilings, options, result, dict(unavailable or {}))
        return {**made, **(more or {})}

    def save() -> None:
        if file is not None:
            report.write(file, document())

    for layer, implementations in wanted:
        if result.stopped is None:
            measure_layer(layer, points, implementations, ceilings, options, result, save)
            say(f"{layer.name}: done after {time.monotonic() - began:.0f} s")
    save()
    data = document()
    for table in report.tables(data):
        Console(width=200).print(table)
    for name, reason in data["unavailable"].items():
        say(f"not here: {name}: {reason}")
    for note in report.notes(data):
        say(note)
    return data
