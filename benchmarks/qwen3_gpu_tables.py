"""Tables of the whole model on a GPU, from what qwen3_gpu.py measured: tables.py writes them."""

from __future__ import annotations

from typing import Any

from qwen3_parts import PARTS
from table_text import results, table_head, table_row

REST = 0.3
"""Seconds of rest before a prompt of the second line."""


def summary() -> str:
    """The speed alone."""
    data = results("qwen3_gpu.json")
    return "\n".join([*speed(data), "", caption(data)]) + "\n"


def whole(name: str = "qwen3_gpu.json") -> str:
    """The speed, and where the time goes."""
    return tables(results(name))


def tables(data: dict[str, Any]) -> str:
    """Markdown of all results."""
    traced = [*parts(data), ""] if data["traces"] else []
    if "traces_of" in data:
        traced += [f"Parts are of {data['traces_of']}.", ""]
    return "\n".join([*speed(data), "", *traced, caption(data)]) + "\n"


def speed(data: dict[str, Any]) -> list[str]:
    """Step times and tokens a second, beside the floor."""
    decoded, filled = data["decode"], data["prefill"]
    took = [row["step_s"] for row in decoded] + [row["first_token_s"] for row in filled]
    tokens = [row["tokens_per_s"] for row in decoded] + [row["n"] / row["first_token_s"] for row in filled]
    rested = [_milliseconds(row["rested_s"]) for row in filled]
    return [
        *table_head(["", *(f"batch {row['B']}" for row in decoded), *(f"prefill {row['n']:,}" for row in filled)]),
        table_row(["ms a step, or to the first token", *map(_milliseconds, took)]),
        table_row([f"ms after {REST} s of rest", *("" for _ in decoded), *rested]),
        table_row(["tokens/s", *(f"{n:,.0f}" for n in tokens)]),
        table_row(["floor, ms", *(f"{row['floor_s'] * 1e3:.2f}" for row in [*decoded, *filled])]),
    ]


def parts(data: dict[str, Any]) -> list[str]:
    """Microseconds and kernels of each part."""
    traces = data["traces"]
    names = [f"prefill {int(name[1:]):,}" if name.startswith("p") else f"batch {name}" for name in traces]
    lines = table_head(["microseconds (kernels)", *names])
    for part in PARTS:
        cells = [trace["parts"].get(part) for trace in traces.values()]
        lines.append(table_row([part, *(f"{cell['us']:,.0f} ({cell['kernels']})" if cell else "" for cell in cells)]))
    return [*lines, table_row(["all, traced", *(f"{trace['us']:,.0f}" for trace in traces.values())])]


def caption(data: dict[str, Any]) -> str:
    """Where, with what and of which weights the results are."""
    here, versions = data["machine"], data["versions"]
    form = data.get("weights", "dense")  # results from before there were other weights say nothing of them
    weights = "bf16" if form == "dense" else f"bf16 with experts in {form}"
    return (
        f"{here['name']}, torch {versions['torch']}, triton {versions.get('triton')}; {weights}, "
        f"{data['layers']} layers; medians of {data['rounds']}. Floor: bytes at "
        f"{here['read_bytes_per_s'] / 1e12:.2f} TB/s, operations at "
        f"{here['flops_per_s'] / 1e12:.0f} TFLOP/s, both measured in the same run."
    )


def _milliseconds(s: float) -> str:
    return f"{s * 1e3:.2f}" if s < 0.02 else f"{s * 1e3:.1f}"
