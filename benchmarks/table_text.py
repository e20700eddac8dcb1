"""What the tables of benchmarks/*_tables.py share: results, cells, rows, where they were measured."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"


def results(name: str) -> Any:
    """A file of benchmarks/results."""
    return json.loads((RESULTS / name).read_text())


def need_matplotlib() -> None:
    """End with one line where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise SystemExit("figures need matplotlib: pip install '.[plot]'")


def table_head(cells: list[Any]) -> list[str]:
    return [table_row(cells), "|---" * len(cells) + "|"]


def table_row(cells: list[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def microseconds(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def told_machine(data: dict[str, Any]) -> str:
    """Where and with what the numbers were measured."""
    machine, versions = data["machine"], data["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton", "transformers") if name in versions)
    read, product = machine["read_bytes_per_s"] / 1e12, machine["flops_per_s"] / 1e12
    return (
        f"{machine['name']}, CUDA {versions['cuda']}, {packages}; ceilings {read:.2f} TB/s and {product:.0f} TFLOP/s; "
        f"medians of up to {data['options']['rounds']} rounds in which implementations take turns."
    )
