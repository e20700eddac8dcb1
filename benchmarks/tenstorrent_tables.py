"""Tables of docs/emulator.md and docs/tenstorrent*.md from benchmarks/results: tables.py writes them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from typing import Any

from table_text import results, table_head, table_row

BANKED = ",layout=banked"
# columns of a decode step's bytes, and the keys that they add
STEP_PARTS = (
    ("attention, router", ("attention",)),
    ("experts", ("experts",)),
    ("the package's other operators", ("other",)),
    ("head, KV", ("head", "kv")),
)


def host() -> str:
    """Microseconds of host time of a layer, before and after, by chip and T."""
    data = results("tenstorrent_host.json")
    lines = table_head(["us of host time", "T", "routing", "gate_up", "down", "a layer", "ratio"])
    for row in data["rows"]:
        before, after = row["before_us"], row["after_us"]
        pairs = [f"{before[name]:.0f} -> {after[name]:.1f}" for name in ("routing", "gate_up", "down", "layer")]
        way = f"{row['where'].split()[1]}, {row['what'].replace('ours', 'this package')}"
        lines.append(table_row([way, row["T"], *pairs, f"{row['ratio']:.0f}"]))
    typed = data["typed_us"]
    apart = [f"{typed[name]:.1f}" for name in ("routing", "gate_up", "down", "layer")]
    lines.append(table_row(["typed operations, on their stand-in", 32, *apart, ""]))
    host = data["host"]
    told = f"{host['processor']}, Python {host['python']}; the quickest of 40 rounds or more."
    return "\n".join([*lines, "", told]) + "\n"


def bytes() -> str:
    """Gigabytes of a chip and decode step, by way to run the model, at batch 1 and 32."""
    steps = results("tenstorrent_cost.json")["steps"]
    lines = table_head(["GB a chip and step, batch 1 / 32", *(name for name, _ in STEP_PARTS), "total"])
    for name, one, many in ways(steps):
        pairs = [[sum(row[key] for key in keys) for row in (one, many)] for _, keys in STEP_PARTS]
        pairs.append([one["total"], many["total"]])
        cells = [" / ".join(f"{value / 1e9:.2f}" for value in pair) for pair in pairs]
        lines.append(table_row([name, *cells]))
    told = f"{steps['model']} on {steps['mesh']} {steps['chip']}, {steps['S']} tokens a row."
    return "\n".join([*lines, "", told]) + "\n"


def estimate() -> str:
    """Milliseconds of a decode step and tokens a second, estimated."""
    steps = results("tenstorrent_cost.json")["steps"]
    head = ["estimated, never on silicon", "operators, sums", "B", "ms, 65%", "tokens/s", "ms, 90%", "tokens/s"]
    lines = table_head(head)
    for name, *rows in ways(steps):
        for row in rows:
            cells: list[str] = []
            for least, most in row["ms"].values():
                cells += [f"{least:.1f}-{most:.1f}", f"{row['B'] * 1e3 / most:.0f}-{row['B'] * 1e3 / least:.0f}"]
            lines.append(table_row([name, f"{row['operators']}, {row['sums']}", row["B"], *cells]))
    told: list[str] = []
    for what, source in steps["sources"].items():
        told += textwrap.wrap(f"**{what.capitalize()}.** {source}.", 118, initial_indent="* ", subsequent_indent="  ")
    return "\n".join([*lines, "", *told]) + "\n"


def layer() -> str:
    """What the layer of bf16 weights costs one device: counts, and what they are over their minimum."""
    head = ["chip", "routing", "T", "pairs", "weights MB", "over", "other MB", "over", "multiplies", "over"]
    lines = table_head([*head, "max / mean", "cores", "L1 KiB", "roofline us", "model us"])
    for row in results("tenstorrent_cost.json")["costs"]:
        if row["weights"] != "bfloat16" or row["split"]:
            continue
        weights = f"{row['weight_bytes'] / 1e6:.1f}", f"{row['weight_over']:.3f}"
        other = f"{row['other_bytes'] / 1e6:.2f}", f"{row['other_over']:.2f}"
        multiplies = row["tile_multiplies"], f"{row['multiplies_over']:.3f}", f"{row['max_over_mean']:.2f}"
        cores, l1 = f"{row['cores_with_weights']}/{row['cores']}", math.ceil(row["l1_high_water"] / 1024)
        times = f"{row['roofline_us']:.0f}", f"{row['simulated_us']:.0f}"
        cells = row["chip"], row["routing"], row["T"], row["pairs"], *weights, *other, *multiplies, cores, l1, *times
        lines.append(table_row([*cells]))
    return "\n".join(lines) + "\n"


def banks() -> str:
    """Weights interleaved over DRAM banks, and by bank: packets, links, time."""
    rows = results("tenstorrent_cost.json")["costs"]
    rows = [row for row in rows if row["routing"] == "uniform" and not row["split"]]
    by_case = {(row["chip"], row["weights"], row["T"]): row for row in rows}
    head = ["chip", "weights", "T", "DRAM alone, us", "model us", "DRAM packets", "links a byte passes"]
    lines = table_head([*head, "busiest link, us: NoC 1, NoC 0, by bank"])
    for (chip, form, T), after in by_case.items():
        before = by_case.get((chip, form.removesuffix(BANKED), T))
        if not form.endswith(BANKED) or before is None:
            continue
        cells = [f"{before['roofline_us']:.0f}"]
        for key, digits in (("simulated_us", 0), ("dram_packets", 0), ("hops", 1)):
            cells.append(f"{before[key]:.{digits}f} -> {after[key]:.{digits}f}")
        cells.append(f"{before['exchanged_us']:.0f}, {before['link_us']:.0f}, {after['link_us']:.0f}")
        lines.append(table_row([chip, form.removesuffix(BANKED), T, *cells]))
    return "\n".join(lines) + "\n"


def choice() -> str:
    """Which formats and experts for which aim, by batch; a head of 4 bits costs too much of the correlation."""
    rows = [row for row in results("tenstorrent_cost.json")["steps"]["rows"] if "head=bfloat4_b" not in row["weights"]]
    aims: dict[str, Callable[[dict[str, Any]], Any]] = {
        "least loss of quality in block formats": lambda row: (
            row["weights"].count("bfloat4_b") or row["weights"] == "bfloat16"
        ),
        "least time by estimate": lambda row: row["ms"]["0.65"],
        "fewest bytes": lambda row: row["total"],
    }
    lines = table_head(["B", "aim", "options", "GB", "ms by estimate", "tokens/s by estimate"])
    for B in (1, 32):
        for aim, rank in aims.items():
            row = min((row for row in rows if row["B"] == B), key=rank)
            least, most = row["ms"]["0.65"]
            options = f"`--weights {row['weights']}{' --experts split' if row['split'] else ''}`"
            cells = [f"{row['total'] / 1e9:.2f}", f"{least:.1f}-{most:.1f}"]
            lines.append(table_row([B, aim, options, *cells, f"{B * 1e3 / most:.0f}-{B * 1e3 / least:.0f}"]))
    return "\n".join([*lines, "", "Never on silicon; 65% of the peak bandwidth."]) + "\n"


def ways(steps: dict[str, Any]) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Each way to run the model, with its rows of batch 1 and 32."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in steps["rows"]:
        found.setdefault(row["way"], []).append(row)
    return [(name, rows[0], rows[1]) for name, rows in found.items()]


def quality() -> str:
    """Right answers of each task, by format of the weights."""
    data = results("tenstorrent_quality.json")
    rows = data["rows"]
    tasks = list(next(iter(rows.values()))["tasks"])
    lines = table_head([f"weights; right of {data['examples']}", *tasks, "correlation of logits"])
    for name, row in rows.items():
        asked = row.get("examples", data["examples"])
        of = "" if asked == data["examples"] else f" of {asked}"
        lines.append(table_row([name, *(f"{n}{of}" for n in row["tasks"].values()), f"{row['correlation']:.5f}"]))
    return "\n".join(lines) + "\n"
