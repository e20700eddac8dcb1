"""`ttnn-moe bench`: our backends on one layer of a size given on the command line, beside the floor."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import typer
from rich.console import Console

from .. import registry
from ..arguments import FLOATS, names_of
from ..contract import HIDDEN_DTYPES
from ..errors import BackendUnavailable, RequestError
from ..sizes import natural
from ..tables import console_of
from ..visible import visible
from . import report
from .floor import measure_ceilings
from .implementations import device_of, ours
from .layer import Layer, fit, free_bytes
from .measure import Options, Point, Result, measure_layer

_WIDE = 1 << 16
"""Columns in a pipe, where rich would take 80, and lose cells: more than any table has."""


def points_of(tokens: str) -> list[Point]:
    """From "1,32,4096s": numbers of tokens, those with an s skewed.

    Raises:
        RequestError: something else.
    """
    points = []
    for word in map(str.strip, tokens.split(",")):
        T = natural(word.removesuffix("s"))
        if not T:
            raise RequestError("tokens cannot be read", got=repr(word), expected="numbers from 1 on, as in 1,32,4096s")
        points.append(Point(T, word.endswith("s")))
    return list(dict.fromkeys(points))


def bench(
    layer: Layer, tokens: str, dtype: str, backend: str, device: str | None, rounds: int, seed: int, as_json: bool
) -> None:
    """Measure and print.

    Raises:
        ContractError, RequestError: sizes that make no sense or do not fit, before memory is taken.
        BackendUnavailable: the backend or the device is not here. typer.Exit: something failed, or is wrong.
    """
    backend = registry.asked_for(backend)
    points, layer, options = _asked(layer, tokens, dtype, backend, device, rounds, seed)
    data = run(layer, points, backend, options)
    if as_json:
        print(json.dumps(data, indent=1, allow_nan=False))
    else:
        console = console_of(piped_width=_WIDE)
        for table in report.tables(data):
            console.print(table)
        here = data["machine"]
        console.print(
            f"{here['name']}; floor: {here['read_bytes_per_s'] / 1e9:.1f} GB/s read, "
            f"{here['flops_per_s'] / 1e12:.2f} TFLOP/s; medians of up to "
            f"{max((row.get('samples', 0) for row in data['rows']), default=0)} rounds",
            highlight=False,
        )
        for note in report.notes(data):
            console.print(note, highlight=False, markup=False)
    bad = [row for row in data["rows"] if row["status"] in ("wrong", "failed")]
    told = [f"{r['implementation']}, {r['mode']}, T={r['T']}: {r['status']}: {r['reason']}" for r in bad]
    told += [f"stopped: {data['stopped']}"] * (data["stopped"] is not None)
    if told:
        typer.echo(visible(f"ttnn-moe: not everything could be measured: {'; '.join(told)}"), err=True)
        raise typer.Exit(1)


def tune(layer: Layer, tokens: str, dtype: str, device: str | None, rounds: int, seed: int) -> None:
    """Time the tiles of the CUDA kernels, print them, and keep the fastest for plans.

    Raises:
        ContractError, RequestError, BackendUnavailable: as bench.
    """
    from .tune import tune

    points, layer, options = _asked(layer, tokens, dtype, "cuda", device, rounds, seed)
    tune(layer, points, options, console_of())


def _asked(
    layer: Layer, tokens: str, dtype: str, backend: str, device: str | None, rounds: int, seed: int
) -> tuple[list[Point], Layer, Options]:
    """Points, layer and options of a run that fits the device."""
    if dtype not in FLOATS:
        raise RequestError("no such dtype", got=repr(dtype), expected=names_of(*HIDDEN_DTYPES))
    if rounds < 1:
        raise RequestError("there are no rounds", got=rounds, expected="1 or more")
    points, layer = points_of(tokens), replace(layer, dtype=FLOATS[dtype])
    device = device_of(device, backend, layer.weight_format)
    fit(layer, max(point.T for point in points), free_bytes(device))
    sets = 4 if device == "cuda" else 2
    return points, layer, Options(device, rounds=rounds, sets=sets, seed=seed, say=_quietly(console_of(stderr=True)))


def run(layer: Layer, points: list[Point], backend: str, options: Options) -> dict[str, Any]:
    """One layer on our backends: the results, as plain values.

    Raises:
        BackendUnavailable: a backend that was named cannot run this layer.
    """
    implementations = ours(options.device, backend, layer.weight_format)
    for implementation in implementations:
        reason = implementation.why_not(layer, points[0].T)
        if reason is not None and backend != "auto":
            raise BackendUnavailable(
                f"backend {backend!r} cannot run this layer: {reason}", remedy="ttnn-moe why says what can"
            )
    ceilings, result = measure_ceilings(options.device, layer.dtype), Result()
    measure_layer(layer, points, implementations, ceilings, options, result)
    return report.document(options.device, ceilings, options, result, {})


def _quietly(console: Console) -> Callable[[str], object]:
    """Progress on a terminal, nothing in a pipe."""
    return (lambda line: console.print(line, highlight=False, markup=False)) if console.is_terminal else lambda _: None
