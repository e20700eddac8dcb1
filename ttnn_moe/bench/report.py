"""What a run leaves: machine and versions, JSON, a table for the terminal."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from .. import __version__
from ..whole_file import whole_file
from .floor import Ceilings
from .measure import Options, Result

SCHEMA = 1
PACKAGES = ("torch", "triton", "transformers", "vllm", "flashinfer-python", "sonic-moe", "triton-kernels", "kernels")


def machine(device: str, ceilings: Ceilings) -> dict[str, Any]:
    """The device by name, and the two ceilings as measured in this run."""
    if device == "cuda":
        found = torch.cuda.get_device_properties(0)
        here = {
            "name": found.name,
            "multiprocessors": found.multi_processor_count,
            "capability": f"{found.major}.{found.minor}",
            "memory_bytes": found.total_memory,
            "cache_bytes": found.L2_cache_size,
            "driver": _driver(),
        }
    else:
        info = Path("/proc/cpuinfo")
        lines = info.read_text().splitlines() if info.exists() else []
        named = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
        here = {
            "name": (named or [platform.processor()])[0],
            "threads": torch.get_num_threads(),
            "cache_bytes": _last_cache(),
        }
    return {"device": device, **here, **asdict(ceilings)}


def _last_cache() -> int | None:
    """Bytes of the CPU's last-level cache, where Linux tells."""
    sizes = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    text = sizes[-1].read_text().strip() if sizes else ""
    unit = {"K": 2**10, "M": 2**20}.get(text[-1:])
    return int(text[:-1]) * unit if unit and text[:-1].isdigit() else None


def versions() -> dict[str, str | None]:
    """Of what is installed here."""
    found: dict[str, str | None] = {
        "ttnn-moe": __version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
    }
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def document(
    device: str, ceilings: Ceilings, options: Options, result: Result, unavailable: dict[str, str]
) -> dict[str, Any]:
    """Everything, as plain values. unavailable: implementations that are not here, and why."""
    return {
        "schema": SCHEMA,
        "machine": machine(device, ceilings),
        "versions": versions(),
        "options": {"rounds": options.rounds, "seconds": options.seconds, "sets": options.sets, "seed": options.seed},
        "unavailable": unavailable,
        "stopped": result.stopped,
        "layers": result.layers,
        "rows": result.rows,
    }


def write(path: Path, data: dict[str, Any]) -> None:
    """The whole file or none of it."""
    with whole_file(path) as part:
        part.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")


def point_name(row: dict[str, Any]) -> str:
    """A column's head: T, and whether routing is skewed."""
    return f"{row['T']} skewed" if row["skewed"] else str(row["T"])


def tables(data: dict[str, Any]) -> list[Table]:
    """For every layer and mode: microseconds and, in brackets, the ratio to the floor; what was not timed, as words."""
    made = []
    for layer in data["layers"]:
        points = [point_name(draw) for draw in layer["draws"]]
        rows = [row for row in data["rows"] if row["layer"] == layer["name"]]
        title = f"{layer['name']}: E={layer['E']} K={layer['K']} H={layer['H']} I={layer['I']} {layer['dtype']}"
        if layer.get("weight_format", "dense") != "dense":
            title += f", {layer['weight_format']} weights"
        for mode in sorted({row["mode"] for row in rows}, reverse=True):
            table = Table(title=f"{title}, {mode}, us (over floor)", title_justify="left")
            table.add_column("T", no_wrap=True)
            for point in points:
                table.add_column(point, justify="right")
            table.add_row("floor", *(f"{draw['floor_us']:.1f}" for draw in layer["draws"]))
            for name in dict.fromkeys(row["implementation"] for row in rows if row["mode"] == mode):
                cells = {point_name(r): _cell(r) for r in rows if r["implementation"] == name and r["mode"] == mode}
                table.add_row(name, *(cells.get(point, "") for point in points))
            made.append(table)
    return made


def notes(data: dict[str, Any]) -> list[str]:
    """What a reader must know of a run: numbers that a cache may have helped, what was skipped, why it ended early."""
    told, cache = [], data["machine"]["cache_bytes"]
    for layer in data["layers"]:
        warm = [point_name(draw) for draw in layer["draws"] if cache and draw["rotated_bytes"] < 2 * cache]
        if warm:
            told.append(
                f"{layer['name']}: at T={', '.join(warm)} all sets' weights in use are less than twice the cache of "
                f"{cache / 2**20:.0f} MiB, which may hold part of them from turn to turn; a model's would not be there"
            )
    told += _skipped(data["rows"])
    if data["stopped"] is not None:
        told.append(f"stopped: {data['stopped']}")
    return told


def _skipped(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What was skipped, where, and why: a line for each reason."""
    where: dict[tuple[str, str, str], dict[str, None]] = {}
    for row in rows:
        if row["status"] == "skipped":
            key = row["layer"], row["implementation"], row["reason"]
            where.setdefault(key, {})[point_name(row)] = None
    return [f"{layer}: no {name} at T={', '.join(at)}: {reason}" for (layer, name, reason), at in where.items()]


def _cell(row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return str(row["status"])
    return f"{row['median_us']:.1f} ({row['over_floor']:.2f})"


def _driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.split("\n")[0].strip() or None
