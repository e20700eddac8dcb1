"""Tables of the whole model on one GPU and several from benchmarks/results: tables.py writes them."""

from __future__ import annotations

import json
from typing import Any

from qwen3_gpu_tables import REST
from table_text import results, table_head, table_row

LEAST = 0.9
"""Share of first tokens as vLLM's, below which no table is made."""
TIMES = {
    "steps_ms": "decode step, batch {}, ms",
    "prefill_ms": "prefill of {} tokens, ms",
    "rested_prefill_ms": f"prefill of {{}} tokens after {REST} s of rest, ms",
}


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


def qwen3_engine(name: str = "qwen3_engine.json") -> str:
    """Throughput of continuous batching, and how long clients wait, by the rows that run at a time."""
    data = results(name)
    heads = "rows|prompt tokens of a step, at most|new tokens/s|prompt and new tokens/s|seconds|mean rows that ran"
    waits = "first token, median (99th of 100)|between tokens, median (99th)"
    lines = table_head(f"{heads}|{waits}".split("|"))
    for row in data["served"]:
        first, gap = row["first_token_s"], row["between_tokens_s"]
        lines.append(
            table_row(
                [
                    row["rows"],
                    f"{row['prefill_chunk']:,}",
                    f"{row['new_tokens_per_s']:,.0f}",
                    f"{row['tokens_per_s']:,.0f}",
                    f"{row['seconds']:.1f}",
                    f"{row['mean_rows']:.1f}",
                    f"{first['p50']:.2g} s ({first['p99']:.3g})",
                    f"{gap['p50'] * 1e3:.1f} ms ({gap['p99'] * 1e3:.1f})",
                ]
            )
        )
    machine, runs = data["machine"], data["rounds"]
    where = f"{machine['name']} with {machine['read_bytes_per_s'] / 1e12:.2f} TB/s, torch {data['versions']['torch']}"
    told = f"{where}; bf16, {data['layers']} layers; {'one run' if runs == 1 else f'medians of {runs} runs'}."
    return "\n".join([*lines, "", told]) + "\n"


def qwen3_parallel(file: str = "qwen3_parallel.json") -> str:
    """Milliseconds of the whole model on one GPU and on several, and microseconds of a sum alone."""
    data = results(file)
    decode, prefill, sums = data["decode"], data["prefill"], data["sums"]
    gpus = data["machine"]["gpus"]
    heads = [f"batch {row['B']}" for row in decode] + [f"prompt of {row['n']:,}" for row in prefill]
    lines = table_head(["ms a step, or to the first token", *heads])
    names = {"alone": "1 GPU", "nccl": f"{gpus} GPUs, NCCL", "kernels": f"{gpus} GPUs, kernels"}
    for name, shown in names.items():
        lines.append(
            table_row([shown, *(f"{1e3 * row[name]:.2f}" if name in row else "" for row in [*decode, *prefill])])
        )
    faster = (f"{row['alone'] / row['kernels']:.2f}" if "alone" in row else "" for row in [*decode, *prefill])
    lines += [table_row(["times as fast as 1 GPU", *faster]), ""]
    lines += table_head(["us of a sum alone, rows", *(f"{row['T']:,}" for row in sums)])
    kernels = {"nccl": "NCCL, then the residual", "words": "add_parts", "tiles": "add_many"}
    for name, shown in kernels.items():
        lines.append(table_row([shown, *(f"{row[name]:.1f}" if name in row else "" for row in sums)]))
    note = f"; {data['note']}" if "note" in data else ""
    told = f"{gpus} {data['machine']['name']}, torch {data['versions']['torch']}; bf16, {data['layers']} layers{note}."
    return "\n".join([*lines, "", told]) + "\n"


def vllm_serve(name: str = "vllm_serve.json") -> str:
    """vLLM, with the plug-in's experts and whole model, and this package's engine: throughput, steps, equal tokens."""
    data = results(name)
    rows: list[dict[str, Any]] = data["results"]
    assert all(row["tokens_as_vllm"]["first"] >= LEAST for row in rows if row["tokens_as_vllm"])
    named = {"vllm": "vLLM", "experts": "`experts`", "model": "`model`", "ours": "this package's engine"}
    kinds = [kind for kind in named if any(row["kind"] == kind for row in rows)]
    best = {kind: max((row for row in rows if row["kind"] == kind), key=lambda row: row["rows"]) for kind in kinds}
    lines = table_head(["", *(named[kind] for kind in kinds)])

    def line(name: str, cells: dict[str, str]) -> None:
        lines.append(table_row([name, *(cells.get(kind, "") for kind in kinds)]))

    for count in sorted({row["rows"] for row in rows}, reverse=True):
        here = {row["kind"]: f"{row['new_tokens_per_s']:,.0f}" for row in rows if row["rows"] == count}
        line(f"new tokens/s, {count} rows", here)
    for key, name in TIMES.items():
        for size in sorted({size for row in best.values() for size in row.get(key, {})}, key=int):
            found = {kind: best[kind][key][size] for kind in kinds if size in best[kind].get(key, {})}
            line(name.format(f"{int(size):,}"), {kind: f"{ms:.2f}" for kind, ms in found.items()})
    for key, name in (("first", "first tokens as vLLM's"), ("positions", "all tokens as vLLM's")):
        equal = {kind: best[kind]["tokens_as_vllm"] for kind in kinds}
        line(name, {kind: f"{share[key]:.1%}" for kind, share in equal.items() if share})
    about = f"{data['machine']['gpu']}, torch {data['machine']['torch']}, vLLM {best['vllm']['vllm']}"
    experts = " with experts in MXFP4" if "gpt-oss" in best["vllm"].get("model", "") else ""
    return "\n".join([*lines, "", f"{about}, bf16{experts}; medians of rounds, without the first of several."]) + "\n"


def vllm_ranks() -> str:
    """vLLM on several GPUs, with and without the plug-in: throughput, steps, equal tokens."""
    data = results("vllm_ranks.json")
    rows: list[dict[str, Any]] = data["results"]
    kinds = {"vllm": "vLLM", "experts": "`experts`", "model": "`model`"}
    splits = {"tp": "TP {}", "dp": "DP {} + EP"}
    rows.sort(key=lambda row: (list(splits).index(row["split"]), list(kinds).index(row["kind"])))
    names = [f"{splits[row['split']].format(row['gpus'])}, {kinds[row['kind']]}" for row in rows]
    lines = [*table_head(["", *names])]

    def line(name: str, cells: list[str]) -> None:
        lines.append(table_row([name, *cells]))

    line(f"new tokens/s, {rows[0]['rows']} rows", [f"{row['new_tokens_per_s']:,.0f}" for row in rows])
    for B in sorted({B for row in rows for B in row["steps_ms"]}, key=int):
        line(
            f"decode step, batch {B}, ms", [f"{row['steps_ms'][B]:.2f}" if B in row["steps_ms"] else "" for row in rows]
        )
    base = next((f"{row['split']}_{row['kind']}" for row in rows if row["kind"] == "vllm"), None)
    assert base is None or all(row["tokens_as"][base]["first"] >= LEAST for row in rows)
    for key, name in (("first", "first"), ("positions", "all")):
        if base is not None:
            line(f"{name} tokens as vLLM's", [f"{row['tokens_as'][base][key]:.1%}" for row in rows])
    line("all tokens, rounds of one engine", [f"{row['tokens_again']['positions']:.1%}" for row in rows])
    again = [min(row.get("steps_again", {}).values(), default=None) for row in rows]
    if any(share is not None for share in again):
        line("tokens of steps, repeated", ["" if share is None else f"{share:.1%}" for share in again])
    about = f"{rows[0]['gpus']} x {data['machine']['gpu']}, torch {data['machine']['torch']}, vLLM {rows[0]['vllm']}"
    return "\n".join([*lines, "", f"{about}, bf16; medians of rounds, without the first of several."]) + "\n"


def combine(file: str = "combine.json") -> str:
    """Dispatch and combine across GPUs beside NCCL."""
    data = results(file)
    lines = table_head(["op", "T", "H", "SMs", "channels", "copies", "pieces", "us", "GB/s", "NCCL, us", "NCCL, GB/s"])
    for row in data["rows"]:
        assert row["right"]
        variant = json.loads(row["variant"])
        how = ["bulk" if variant.get("bulk") else "16 bytes", variant.get("pieces", "")]
        times = [f"{row['us']:.1f}", f"{row['gb']:.4g}", f"{row['nccl_us']:.1f}", f"{row['nccl_gb']:.4g}"]
        lines.append(table_row([row["op"], row["T"], row["H"], row["sms"], row["channels"], *how, *times]))
    return "\n".join([*lines, "", f"{data['device']}, torch {data['torch']}."]) + "\n"


def combine_nodes(file: str = "combine_nodes.json") -> str:
    """Dispatch and combine of two levels: what crosses between nodes."""
    data = results(file)
    lines = table_head(
        ["op", "T", "H", "SMs of a rank", "us", "rows between nodes, counted", "a flat exchange", "part"]
    )
    for row in data["rows"]:
        assert row["right"]
        part = f"1/{row['flat'] / row['between']:.4g}"
        counts = [f"{row['between']:,}", f"{row['flat']:,}", part]
        lines.append(table_row([row["op"], row["T"], row["H"], row["sms"], f"{row['us']:.1f}", *counts]))
    return (
        "\n".join([*lines, "", f"{data['rows'][0]['topology']} GPUs; {data['device']}, torch {data['torch']}."]) + "\n"
    )


def combine_pairs() -> str:
    """Combine of all pairs, own sums included, beside NCCL."""
    data = results("combine_pairs.json")
    lines = table_head(["T", "H", "K", "SMs of node_combine", "what", "us", "GB/s moved", "GB/s by pairs"])
    for row in data["rows"]:
        assert row["right"]
        sizes = [row[name] for name in ("T", "H", "K", "sms")]
        pairs, rows = (row[rate] * row["us"] for rate in ("pair_gb", "gb"))
        for what, us, moved in (
            ("own sums", "sum_us", 0.0),
            ("node_combine", "combine_us", rows),
            ("both", "us", rows),
            ("NCCL", "nccl_us", pairs),
        ):
            rates = [f"{count / row[us]:,.0f}" if moved else "" for count in (moved, pairs)]
            lines.append(table_row([*sizes, what, f"{row[us]:.1f}", *rates]))
    return "\n".join([*lines, "", f"{data['device']}, torch {data['torch']}."]) + "\n"


def experts_shared(file: str = "experts_shared.json") -> str:
    """Qwen3 with shared experts beside copies."""
    data = results(file)
    kinds = {"copies": "a copy on each GPU", "all_to_all": "shared, NCCL", "hierarchical": "shared, kernels"}
    copies = next(row for row in data["rows"] if row["experts"] == "copies")
    lines = table_head(["experts", "new tokens/s", "beside copies", "GiB of weights a GPU", "freed"])
    for row in data["rows"]:
        assert row.get("equal", True), "the gate of this row was shut"
        gib, whole = (one["model_bytes"] / 2**30 for one in (row, copies))
        rate, beside = row["new_tokens_per_s"], row["new_tokens_per_s"] / copies["new_tokens_per_s"]
        freed = f"{whole - gib:.1f}" if row is not copies else ""
        lines.append(table_row([kinds[row["experts"]], f"{rate:,.0f}", f"{beside:.2f}", f"{gib:.1f}", freed]))
    machine, versions = data["machine"], data["versions"]
    where = f"{machine['gpus']} {machine['name']}, torch {versions['torch']}; bf16, {data['layers']} layers"
    return "\n".join([*lines, "", f"{where}, {data['requests']} requests a GPU."]) + "\n"
