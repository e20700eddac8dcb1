"""Tables of one MoE layer from benchmarks/results: tables.py writes them."""

from __future__ import annotations

from typing import Any

from table_text import microseconds, results, table_head, table_row, told_machine

# what the pages call the implementations of moe_layer.json
OURS, OURS_UNPREPARED = "ttnn_moe cuda prepared", "ttnn_moe cuda moe"
SHORT = {OURS: "ttnn_moe", OURS_UNPREPARED: "ttnn_moe, without `prepare`"}


def cpu_layer(name: str = "cpu_layer.json") -> str:
    """Milliseconds of the reference backend and of transformers' best, by T and dtype."""
    data = results(name)
    machine, rows = data["machine"], data["rows"]
    counts = sorted({row["T"] for row in rows})
    lines = table_head(["T", *counts])
    for dtype in ("bf16", "fp32"):
        here = [row for row in rows if row["dtype"] == dtype]
        ours = {row["T"]: row["median_ms"] for row in here if row["implementation"].startswith("ttnn_moe")}
        peers = {
            T: min(row["median_ms"] for row in here if row["T"] == T and row["implementation"].startswith("trans"))
            for T in counts
        }
        lines.append(table_row([f"{dtype}, reference", *(f"{ours[T]:.1f}" for T in counts)]))
        lines.append(table_row([f"{dtype}, transformers' best", *(f"{peers[T]:.1f}" for T in counts)]))
    lines.append("")
    lines.append(
        f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}, transformers "
        f"{machine['transformers']}; medians of {machine['rounds']} rounds in which implementations take turns."
    )
    return "\n".join(lines) + "\n"


def moe_layer() -> str:
    """Qwen3's layer: the floor, ours and the peers measured beside it, as graphs and eager; and where."""
    data = results("moe_layer.json")
    layer = data["layers"][0]
    names = [OURS, "torch grouped_mm", "transformers grouped_mm"]
    return "\n".join([*layer_table(data, layer, names, [OURS, names[-1]]), "", told_machine(data)]) + "\n"


def moe_layer_all() -> str:
    """Every layer, implementation and mode."""
    data = results("moe_layer.json")
    lines = []
    for layer in data["layers"]:
        names = list(dict.fromkeys(r["implementation"] for r in data["rows"] if r["layer"] == layer["name"]))
        cut = "" if layer["E"] == layer["E_of_the_model"] else f" of the model's {layer['E_of_the_model']}"
        lines += [
            f"### {layer['name']}: E {layer['E']}{cut}, K {layer['K']}, H {layer['H']}, I {layer['I']}",
            "",
            *layer_table(data, layer, names, names),
            "",
        ]
    return "\n".join([*lines, told_machine(data), *told_stop(data)]) + "\n"


def peers_h200() -> str:
    """Peers measured apart: over the floor of their own draws, at the ceilings of moe_layer.json; ours beside them."""
    apart, data = results("peers_h200.json"), results("moe_layer.json")
    layer = next(layer for layer in data["layers"] if layer["name"] == apart["layer"])
    points = [point_of(draw) for draw in layer["draws"]]
    lines = table_head(["T", *map(point_name, points)])
    ours = timed(data, layer, OURS, "graph")
    lines.append(table_row([SHORT[OURS], *(f"{ours[p]['over_floor']:.2f}" if p in ours else "" for p in points)]))
    for name in dict.fromkeys(row["implementation"] for row in apart["rows"]):
        ratios = {point_of(r): over_floor(r, data["machine"]) for r in apart["rows"] if r["implementation"] == name}
        lines.append(table_row([name, *(f"{ratios[p]:.2f}" if p in ratios else "" for p in points)]))
    return "\n".join(lines) + "\n"


def sm80_layer() -> str:
    """Microseconds of the layer with compute_80 code on a newer GPU, and of what was measured beside it."""
    data = results("sm80_layer.json")
    layer = data["layers"][0]
    points = {point_of(draw): draw for draw in layer["draws"]}
    lines = table_head(["T", *map(point_name, points)])
    lines.append(table_row(["floor", *(microseconds(draw["floor_us"]) for draw in points.values())]))
    names = {
        OURS: "sm80",
        "triton sm80": "Triton kernels of this package for sm_80",
        "vllm sm80": "vLLM 0.22.1 for sm_80",
    }
    for name, shown in names.items():
        rows = timed(data, layer, name, "graph")
        lines.append(table_row([shown, *(cell(rows[point]) if point in rows else "" for point in points)]))
    for name, found in data["beside"].items():
        rows = {point_of(row): row for row in found if row["status"] == "ok"}
        cells = [microseconds(rows[point]["median_us"]) if point in rows else "" for point in points]
        lines.append(table_row([name.replace("sm80_", "sm80 "), *cells]))
    return "\n".join([*lines, "", told_machine(data)]) + "\n"


def format_layers(weight_format: str, file: str = "") -> str:
    """The layers with experts of a format: the backend's choice, each family and peers, as graphs."""
    data = results(file or f"{weight_format}_layer.json")
    lines = []
    for layer in data["layers"]:
        names = list(dict.fromkeys(r["implementation"] for r in data["rows"] if r["layer"] == layer["name"]))
        sizes = f"{layer['name']}: E {layer['E']}, K {layer['K']}, H {layer['H']}, I {layer['I']}"
        title = sizes if layer["weight_format"] == "dense" else f"{weight_format}, {sizes}"
        lines += [f"### {title}", "", *layer_table(data, layer, names, []), ""]
    return "\n".join([*lines, told_machine(data), *told_stop(data)]) + "\n"


def told_stop(data: dict[str, Any]) -> list[str]:
    """Why a run ended early."""
    return [f"The run ended early: {data['stopped']}."] if data.get("stopped") else []


def over_floor(row: dict[str, Any], machine: dict[str, Any]) -> float:
    """A row of peers_h200.json over the floor of its bytes and operations at a machine's ceilings."""
    floor_us = max(row["bytes"] / machine["read_bytes_per_s"], row["flops"] / machine["flops_per_s"]) * 1e6
    return float(row["median_us"]) / floor_us


def layer_table(data: dict[str, Any], layer: dict[str, Any], graph: list[str], eager: list[str]) -> list[str]:
    """Microseconds and, in brackets, the ratio to the floor; blank: not measured there."""
    points = {point_of(draw): draw for draw in layer["draws"]}
    lines = table_head(["T", *map(point_name, points)])
    lines.append(table_row(["floor", *(microseconds(draw["floor_us"]) for draw in points.values())]))
    for mode, names in (("graph", graph), ("eager", eager)):
        for name in names:
            rows = timed(data, layer, name, mode)
            if rows:
                cells = [cell(rows[point]) if point in rows else "" for point in points]
                lines.append(table_row([f"{SHORT.get(name, name)}, {mode}", *cells]))
    return lines


def timed(data: dict[str, Any], layer: dict[str, Any], name: str, mode: str) -> dict[tuple[int, bool], dict[str, Any]]:
    """The rows of an implementation that have a time, by point."""
    return {
        point_of(row): row
        for row in data["rows"]
        if (row["layer"], row["implementation"], row["mode"], row["status"]) == (layer["name"], name, mode, "ok")
    }


def point_of(row: dict[str, Any]) -> tuple[int, bool]:
    return row["T"], row["skewed"]


def point_name(point: tuple[int, bool]) -> str:
    return f"{point[0]} skewed" if point[1] else str(point[0])


def cell(row: dict[str, Any]) -> str:
    return f"{microseconds(row['median_us'])} ({row['over_floor']:.2f})"
