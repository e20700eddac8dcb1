"""Write the README's measured table from benchmarks/results: python benchmarks/tables.py."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
START, END = "<!-- cpu_layer.json -->\n", "<!-- end -->"


def cpu_layer() -> str:
    """Milliseconds of the reference backend and of transformers' best, by T and dtype."""
    data = json.loads((ROOT / "benchmarks/results/cpu_layer.json").read_text())
    machine, rows = data["machine"], data["rows"]
    counts = sorted({row["T"] for row in rows})
    lines = ["| T | " + " | ".join(map(str, counts)) + " |", "|---" * (len(counts) + 1) + "|"]
    for dtype in ("bf16", "fp32"):
        here = [row for row in rows if row["dtype"] == dtype]
        ours = {row["T"]: row["median_ms"] for row in here if row["implementation"].startswith("ttnn_moe")}
        peers = {
            T: min(row["median_ms"] for row in here if row["T"] == T and row["implementation"].startswith("trans"))
            for T in counts
        }
        lines.append(f"| {dtype}, reference | " + " | ".join(f"{ours[T]:.1f}" for T in counts) + " |")
        lines.append(f"| {dtype}, transformers' best | " + " | ".join(f"{peers[T]:.1f}" for T in counts) + " |")
    lines.append("")
    lines.append(
        f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}, transformers "
        f"{machine['transformers']}; medians of {machine['rounds']} rounds in which implementations take turns."
    )
    return "\n".join(lines) + "\n"


def updated(readme: str) -> str:
    """The README with its table as the results have it."""
    head, rest = readme.split(START)
    return head + START + cpu_layer() + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(updated(path.read_text()))
