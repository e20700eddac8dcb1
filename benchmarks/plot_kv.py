"""Draw docs/kv_quality.svg from benchmarks/results/kv_quality.json: python benchmarks/plot_kv.py (needs matplotlib).

The same results and the same matplotlib give the same bytes.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import typer
from command_line import run_script
from table_text import ROOT, need_matplotlib

RESULTS = ROOT / "benchmarks/results/kv_quality.json"
COLOURS = ("#c0392b", "#2471a3", "#1e8449", "#b9770e", "#7d3c98")


def draw(found: dict[str, Any], path: Path) -> None:
    """Attention's error against bits, a panel a draw; and the divergence of the model's next token against bits."""
    need_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "kv_quality", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    draws = found["attention"]
    figure, axes = pyplot.subplots(1, len(draws) + 1, figsize=(3.6 * (len(draws) + 1), 4.2), layout="constrained")
    for axis, (draw_, variants) in zip(axes, draws.items(), strict=False):
        for (variant, by_bits), colour in zip(variants.items(), COLOURS, strict=False):
            axis.plot(
                [int(b) for b in by_bits], list(by_bits.values()), "o-", color=colour, markersize=4, label=variant
            )
        axis.set(yscale="log", ylim=(5e-3, 30), xlabel="bits", title=draw_)
        axis.set_xticks((2, 3, 4, 8))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("relative error of attention's output")
    axes[0].legend(fontsize=7)
    last = axes[-1]
    for name, colour in zip(("bucketed", "uniform", "plain int4"), COLOURS, strict=False):
        rows = [row for row in found["tasks"] if row["task"] == "recall" and row["cache"] == name]
        last.plot([r["bits"] for r in rows], [r["divergence"] for r in rows], "o-", color=colour, label=name)
    last.set(yscale="log", xlabel="average bits", title="tiny model, recall", ylabel="divergence of the next token")
    last.legend(fontsize=7)
    last.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None, "Creator": None, "Description": drawn_from()})
    pyplot.close(figure)


def drawn_from() -> str:
    """What the figure is drawn from, by content."""
    return f"{RESULTS.name} {sha256(RESULTS.read_bytes()).hexdigest()[:16]}"


def main(out: Annotated[Path, typer.Option(help="SVG to write.")] = ROOT / "docs/kv_quality.svg") -> None:
    """Draw the results of benchmarks/kv_quality.py."""
    draw(json.loads(RESULTS.read_text()), out)


if __name__ == "__main__":
    run_script(main)
