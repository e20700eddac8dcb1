"""Draw docs/moe_layer.svg from benchmarks/results: python benchmarks/plot.py (needs matplotlib: pip install '.[plot]').

The same results and the same matplotlib give the same bytes.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import typer
from command_line import run_script
from layer_tables import OURS, over_floor, timed
from table_text import RESULTS, ROOT, need_matplotlib, results

# name in moe_layer.json -> (label, colour)
LINES = {
    OURS: ("ttnn_moe", "#c0392b"),
    "torch grouped_mm": ("torch grouped_mm", "#2471a3"),
    "transformers grouped_mm": ("transformers grouped_mm", "#1e8449"),
}
APART = ("#7d3c98", "#b9770e", "#5d6d7e", "#16a085", "#a04000", "#909497")
TICKS = (1, 1.25, 1.5, 2, 3, 4, 6, 8)


def draw(data: dict[str, Any], apart: dict[str, Any], path: Path) -> None:
    """One panel a layer: time over the floor against T, graph replay, uniform routing."""
    need_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "moe_layer", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    layers = data["layers"]
    figure, axes = pyplot.subplots(
        1, len(layers), figsize=(4.6 * len(layers) + 1.4, 4.8), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, layer in zip(axes[0], layers, strict=True):
        tokens = [d["T"] for d in layer["draws"] if not d["skewed"]]
        if layer["name"] == apart["layer"]:
            for name, colour in zip(dict.fromkeys(r["implementation"] for r in apart["rows"]), APART, strict=False):
                rows = [r for r in apart["rows"] if r["implementation"] == name and not r["skewed"]]
                ratios = [over_floor(r, data["machine"]) for r in rows]
                axis.plot([r["T"] for r in rows], ratios, "--", color=colour, linewidth=1, label=f"{name}*")
        for name, (label, colour) in LINES.items():
            rows = timed(data, layer, name, "graph")
            at = [T for T in tokens if (T, False) in rows]
            ratios = [rows[T, False]["over_floor"] for T in at]
            axis.plot(at, ratios, "o-", color=colour, linewidth=2, markersize=4, label=label, zorder=3)
        axis.set(xscale="log", yscale="log", xlabel="T, tokens", ylim=(0.95, 9))
        axis.set_title(f"{layer['name']} (E {layer['E']}, K {layer['K']}, H {layer['H']}, I {layer['I']})", fontsize=9)
        axis.set_xticks(tokens, map(str, tokens), rotation=45)
        axis.set_yticks(TICKS, map(str, TICKS))
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.axhline(1, color="black", linewidth=1)
    axes[0][0].set_ylabel("time over the floor")
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(layers) + 1, fontsize=7
    )
    figure.savefig(path, metadata={"Date": None, "Creator": None, "Description": drawn_from()})
    pyplot.close(figure)


def drawn_from() -> str:
    """What a figure is drawn from, by content: written into it, so that a test sees when it is out of date."""
    digests = [sha256((RESULTS / name).read_bytes()).hexdigest()[:16] for name in ("moe_layer.json", "peers_h200.json")]
    return f"moe_layer.json {digests[0]}, peers_h200.json {digests[1]}"


def main(out: Annotated[Path, typer.Option(help="SVG to write.")] = ROOT / "docs/moe_layer.svg") -> None:
    """Draw the results of benchmarks/moe_layer.py."""
    draw(results("moe_layer.json"), results("peers_h200.json"), out)


if __name__ == "__main__":
    run_script(main)
