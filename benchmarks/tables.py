"""Write the measured tables of README.md and of pages of docs/ from benchmarks/results: python benchmarks/tables.py.

A table stands between `<!-- NAME -->`, NAME being a key of TABLES, and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import kv_tables

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
PAGES = (
    ROOT / "README.md",
    ROOT / "docs/benchmark.md",
    ROOT / "docs/expert_parallel.md",
    ROOT / "docs/tenstorrent.md",
    ROOT / "docs/tenstorrent_kernels.md",
    ROOT / "docs/kv.md",
    ROOT / "docs/tensor_parallel.md",
    ROOT / "docs/vllm.md",
)
# what the pages call the implementations of moe_layer.json
OURS, OURS_UNPREPARED = "ttnn_moe cuda prepared", "ttnn_moe cuda moe"
SHORT = {OURS: "ttnn_moe", OURS_UNPREPARED: "ttnn_moe, without `prepare`"}

# columns of a decode step's bytes, and the keys that they add
BANKED = ",layout=banked"
STEP_PARTS = (
    ("attention, router", ("attention",)),
    ("experts", ("experts",)),
    ("our operators' other", ("other",)),
    ("head, KV", ("head", "kv")),
)


def results(name: str) -> dict[str, Any]:
    """A file of benchmarks/results."""
    loaded: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return loaded


def cpu_layer() -> str:
    """Milliseconds of the reference backend and of transformers' best, by T and dtype."""
    data = results("cpu_layer.json")
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
    return "\n".join([*lines, told_machine(data)]) + "\n"


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
    names = {OURS: "sm80", "triton sm80": "our Triton kernels for sm_80", "vllm sm80": "vLLM 0.22.1 for sm_80"}
    for name, shown in names.items():
        rows = timed(data, layer, name, "graph")
        lines.append(table_row([shown, *(cell(rows[point]) if point in rows else "" for point in points)]))
    for name, found in data["beside"].items():
        rows = {point_of(row): row for row in found if row["status"] == "ok"}
        cells = [microseconds(rows[point]["median_us"]) if point in rows else "" for point in points]
        lines.append(table_row([name.replace("sm80_", "sm80 "), *cells]))
    return "\n".join([*lines, "", told_machine(data)]) + "\n"


def format_layers(weight_format: str) -> str:
    """The layers with experts of a format: the backend's choice, each family and peers, as graphs."""
    data = results(f"{weight_format}_layer.json")
    lines = []
    for layer in data["layers"]:
        names = list(dict.fromkeys(r["implementation"] for r in data["rows"] if r["layer"] == layer["name"]))
        sizes = f"{layer['name']}: E {layer['E']}, K {layer['K']}, H {layer['H']}, I {layer['I']}"
        title = sizes if layer["weight_format"] == "dense" else f"{weight_format}, {sizes}"
        lines += [f"### {title}", "", *layer_table(data, layer, names, []), ""]
    return "\n".join([*lines, told_machine(data)]) + "\n"


def qwen3_sm80() -> str:
    """Milliseconds of the whole model, every kernel compiled for sm_80, beside the GPU's own kernels."""
    data = results("qwen3_sm80.json")
    older, own = data["sm_80"], data["sm_90a"]
    lines = table_head(
        [
            "ms a step, or to the first token",
            *(f"batch {row['B']}" for row in older["decode"]),
            *(f"prompt of {row['n']:,}" for row in older["prefill"]),
        ]
    )
    times = {
        name: [*(row["step_s"] for row in data["decode"]), *(row["first_token_s"] for row in data["prefill"])]
        for name, data in (("sm_80 code", older), ("the GPU's own", own))
    }
    lines += [table_row([name, *(f"{1e3 * s:.2f}" for s in found)]) for name, found in times.items()]
    ratios = (a / b for a, b in zip(*times.values(), strict=True))
    lines.append(table_row(["ratio", *(f"{ratio:.2f}" for ratio in ratios)]))
    machine, versions = older["machine"], older["versions"]
    lines += [
        "",
        f"{machine['name']}, torch {versions['torch']}, triton {versions['triton']}; bf16, 48 layers; medians of 3.",
    ]
    return "\n".join(lines) + "\n"


def qwen3_parallel() -> str:
    """Milliseconds of the whole model on one GPU and on several, and microseconds of a sum alone."""
    data = results("qwen3_parallel.json")
    decode, prefill, sums = data["decode"], data["prefill"], data["sums"]
    gpus = data["machine"]["gpus"]
    heads = [f"batch {row['B']}" for row in decode] + [f"prompt of {row['n']:,}" for row in prefill]
    lines = table_head(["ms a step, or to the first token", *heads])
    names = {"alone": "1 GPU", "nccl": f"{gpus} GPUs, NCCL", "one_shot": f"{gpus} GPUs, sums in one hop"}
    for name, shown in names.items():
        lines.append(table_row([shown, *(f"{1e3 * row[name]:.2f}" for row in [*decode, *prefill])]))
    faster = (f"{row['alone'] / row['one_shot']:.2f}" for row in [*decode, *prefill])
    lines += [table_row(["times as fast as 1 GPU", *faster]), ""]
    lines += table_head(["us of a sum alone, rows", *(f"{row['T']:,}" for row in sums)])
    kernels = {"nccl": "NCCL, then the residual", "words": "add_parts", "tiles": "add_many"}
    for name, shown in kernels.items():
        lines.append(table_row([shown, *(f"{row[name]:.1f}" if name in row else "" for row in sums)]))
    note = f"; {data['note']}" if "note" in data else ""
    told = f"{gpus} {data['machine']['name']}, torch {data['versions']['torch']}; bf16, {data['layers']} layers{note}."
    return "\n".join([*lines, "", told]) + "\n"


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


def tenstorrent_host() -> str:
    """Microseconds of host time of a layer, before and after, by chip and T."""
    data = results("tenstorrent_host.json")
    lines = table_head(["us of host time", "T", "routing", "gate_up", "down", "a layer", "ratio"])
    for row in data["rows"]:
        before, after = row["before_us"], row["after_us"]
        pairs = [f"{before[name]:.0f} -> {after[name]:.1f}" for name in ("routing", "gate_up", "down", "layer")]
        lines.append(table_row([f"{row['where'].split()[1]}, {row['what']}", row["T"], *pairs, f"{row['ratio']:.0f}"]))
    typed = data["typed_us"]
    apart = [f"{typed[name]:.1f}" for name in ("routing", "gate_up", "down", "layer")]
    lines.append(table_row(["typed operations, on their stand-in", 32, *apart, ""]))
    host = data["host"]
    told = f"{host['processor']}, Python {host['python']}; the quickest of 40 rounds or more."
    return "\n".join([*lines, "", told]) + "\n"


def tenstorrent_bytes() -> str:
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


def tenstorrent_estimate() -> str:
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
    told = "; ".join(f"**{what}**: {source}" for what, source in steps["sources"].items())
    return "\n".join([*lines, "", *textwrap.wrap(told + ".", 118)]) + "\n"


def tenstorrent_banks() -> str:
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


def tenstorrent_choice() -> str:
    """Which formats and experts for which aim, by batch; a head of 4 bits costs too much of the correlation."""
    rows = [row for row in results("tenstorrent_cost.json")["steps"]["rows"] if "head=bfloat4_b" not in row["weights"]]
    aims: dict[str, Callable[[dict[str, Any]], Any]] = {
        "least loss of quality": lambda row: row["weights"].count("bfloat4_b") or row["weights"] == "bfloat16",
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


def tenstorrent_quality() -> str:
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


def timed(data: dict[str, Any], layer: dict[str, Any], name: str, mode: str) -> dict[tuple[int, bool], dict[str, Any]]:
    """The rows of an implementation that have a time, by point."""
    return {
        point_of(row): row
        for row in data["rows"]
        if (row["layer"], row["implementation"], row["mode"], row["status"]) == (layer["name"], name, mode, "ok")
    }


def told_machine(data: dict[str, Any]) -> str:
    """Where and with what the numbers were measured."""
    machine, versions = data["machine"], data["versions"]
    packages = ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton", "transformers") if name in versions)
    read, product = machine["read_bytes_per_s"] / 1e12, machine["flops_per_s"] / 1e12
    return (
        f"{machine['name']}, CUDA {versions['cuda']}, {packages}; ceilings {read:.2f} TB/s and {product:.0f} TFLOP/s; "
        f"medians of up to {data['options']['rounds']} rounds in which implementations take turns."
    )


def point_of(row: dict[str, Any]) -> tuple[int, bool]:
    return row["T"], row["skewed"]


def point_name(point: tuple[int, bool]) -> str:
    return f"{point[0]} skewed" if point[1] else str(point[0])


def cell(row: dict[str, Any]) -> str:
    return f"{microseconds(row['median_us'])} ({row['over_floor']:.2f})"


def microseconds(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def table_row(cells: list[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def table_head(cells: list[Any]) -> list[str]:
    return [table_row(cells), "|---" * len(cells) + "|"]


def vllm_serve() -> str:
    """vLLM, with our experts, with our whole model, and our engine: throughput, steps, prefills, equal tokens."""
    if not (RESULTS / "vllm_serve.json").exists():
        return "No figures are kept.\n"
    data = results("vllm_serve.json")
    rows: list[dict[str, Any]] = data["results"]
    named = {"vllm": "vLLM", "experts": "`experts`", "model": "`model`", "ours": "our engine"}
    kinds = [kind for kind in named if any(row["kind"] == kind for row in rows)]
    best = {kind: max((row for row in rows if row["kind"] == kind), key=lambda row: row["rows"]) for kind in kinds}
    lines = table_head(["", *(named[kind] for kind in kinds)])

    def line(name: str, cells: dict[str, str]) -> None:
        lines.append(table_row([name, *(cells.get(kind, "") for kind in kinds)]))

    for count in sorted({row["rows"] for row in rows}, reverse=True):
        here = {row["kind"]: f"{row['new_tokens_per_s']:,.0f}" for row in rows if row["rows"] == count}
        line(f"new tokens/s, {count} rows", here)
    for key, name in (("steps_ms", "step of {} rows, ms"), ("prefill_ms", "prefill of {} tokens, ms")):
        for size in next(iter(best.values()))[key]:
            found = {kind: best[kind][key][size] for kind in kinds if size in best[kind][key]}
            line(name.format(f"{int(size):,}"), {kind: f"{ms:.2f}" for kind, ms in found.items()})
    for key, name in (("first", "first tokens as vLLM's"), ("positions", "all tokens as vLLM's")):
        equal = {kind: best[kind]["tokens_as_vllm"] for kind in kinds}
        line(name, {kind: f"{share[key]:.1%}" for kind, share in equal.items() if share})
    about = f"{data['machine']['gpu']}, torch {data['machine']['torch']}, vLLM {best['vllm']['vllm']}"
    return "\n".join([*lines, "", f"{about}, bf16; medians of rounds."]) + "\n"


def combine() -> str:
    """Dispatch and combine across GPUs beside NCCL."""
    data = results("combine.json")
    lines = table_head(["op", "T, H", "SMs", "channels, copies", "time, rate", "NCCL all_to_all_single"])
    for row in data["rows"]:
        assert row["right"]
        variant = json.loads(row["variant"])
        copies = "bulk" if variant.get("bulk") else "16 bytes"
        copies += f", {variant['pieces']} pieces" if "pieces" in variant else ""
        times = [f"{row[us]:.1f} us, {row[gb]:.4g} GB/s" for us, gb in (("us", "gb"), ("nccl_us", "nccl_gb"))]
        lines.append(
            table_row([row["op"], f"{row['T']}, {row['H']}", row["sms"], f"{row['channels']}, {copies}", *times])
        )
    return "\n".join([*lines, "", f"{data['device']}, torch {data['torch']}."]) + "\n"


def combine_nodes() -> str:
    """Dispatch and combine of two levels: what crosses between nodes."""
    data = results("combine_nodes.json")
    lines = table_head(
        ["op", "T, H", "SMs of a rank", "time", "rows between nodes, counted", "a flat exchange", "part"]
    )
    for row in data["rows"]:
        assert row["right"]
        part = f"1/{row['flat'] / row['between']:.4g}"
        counts = [f"{row['between']:,}", f"{row['flat']:,}", part]
        lines.append(table_row([row["op"], f"{row['T']}, {row['H']}", row["sms"], f"{row['us']:.1f} us", *counts]))
    return (
        "\n".join([*lines, "", f"{data['rows'][0]['topology']} GPUs; {data['device']}, torch {data['torch']}."]) + "\n"
    )


def experts_shared() -> str:
    """Qwen3 with shared experts beside copies."""
    data = results("experts_shared.json")
    kinds = {"copies": "a copy on each GPU", "all_to_all": "shared, NCCL", "hierarchical": "shared, kernels"}
    copies = next(row for row in data["rows"] if row["experts"] == "copies")
    lines = table_head(["experts", "new tokens/s", "beside copies", "GiB of weights a GPU", "freed"])
    for row in data["rows"]:
        gib, whole = (one["model_bytes"] / 2**30 for one in (row, copies))
        rate, beside = row["new_tokens_per_s"], row["new_tokens_per_s"] / copies["new_tokens_per_s"]
        freed = f"{whole - gib:.1f}" if row is not copies else ""
        lines.append(table_row([kinds[row["experts"]], f"{rate:,.0f}", f"{beside:.2f}", f"{gib:.1f}", freed]))
    machine, versions = data["machine"], data["versions"]
    where = f"{machine['gpus']} {machine['name']}, torch {versions['torch']}; bf16, {data['layers']} layers"
    return "\n".join([*lines, "", f"{where}, {data['requests']} requests a GPU."]) + "\n"


TABLES: dict[str, Callable[[], str]] = {
    "combine.json": combine,
    "combine_nodes.json": combine_nodes,
    "experts_shared.json": experts_shared,
    "cpu_layer.json": cpu_layer,
    "kv_attention.json": kv_tables.attention,
    "kv_prompts.json": kv_tables.prompts,
    "kv_queries.json": kv_tables.queries,
    "kv_recall.json": kv_tables.recall,
    "qwen3_kv.json": kv_tables.steps,
    "int4_24_layer.json": partial(format_layers, "int4_24"),
    "mxfp4_layer.json": partial(format_layers, "mxfp4"),
    "moe_layer.json": moe_layer,
    "moe_layer.json, all of it": moe_layer_all,
    "peers_h200.json": peers_h200,
    "sm80_layer.json": sm80_layer,
    "qwen3_sm80.json": qwen3_sm80,
    "qwen3_parallel.json": qwen3_parallel,
    "tenstorrent_cost.json, banks": tenstorrent_banks,
    "tenstorrent_cost.json, bytes": tenstorrent_bytes,
    "tenstorrent_cost.json, choice": tenstorrent_choice,
    "tenstorrent_cost.json, estimate": tenstorrent_estimate,
    "tenstorrent_host.json": tenstorrent_host,
    "tenstorrent_quality.json": tenstorrent_quality,
    "vllm_serve.json": vllm_serve,
}


def updated(page: str) -> str:
    """A page with its tables as the results have them.

    Raises:
        ValueError: a table that the page names does not exist.
    """

    def filled(found: re.Match[str]) -> str:
        if found[1] not in TABLES:
            raise ValueError(f"no table {found[1]!r}, expected one of {list(TABLES)}")
        return f"<!-- {found[1]} -->\n{TABLES[found[1]]()}<!-- end -->"

    return re.sub(r"<!-- (?!end -->)([^\n]*?) -->\n.*?<!-- end -->", filled, page, flags=re.S)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(updated(path.read_text()))
