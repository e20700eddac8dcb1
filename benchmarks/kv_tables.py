"""Tables of docs/kv.md from benchmarks/results: tables.py writes them."""

from __future__ import annotations

from statistics import mean, stdev
from typing import Any

from table_text import microseconds, results, table_head, table_row

PACKED = ("3.0 bits, mixed", "8 bits")


def _rows(*rows: list[Any]) -> list[str]:
    """Lines of a table, the first as its head."""
    return [*table_head(rows[0]), *map(table_row, rows[1:])]


def _short(n: int) -> str:
    return f"{n // 1024}k" if n >= 1024 else str(n)


def attention() -> str:
    """Microseconds of one query a row, and the ratio to the packed bytes' floor."""
    cases = [case for case in results("kv_attention.json") if case.get("queries", 1) == 1]
    lines = [["rows, tokens", *(f"{case['rows']}, {_short(case['tokens'])}" for case in cases)]]
    lines += [[name, *(microseconds(case[key]) for case in cases)] for name, key in (("cuDNN, bf16", "cuDNN bf16"),)]
    lines.append(["this package's bf16 kernel", *(microseconds(case["bf16 kernel"]) for case in cases)])
    for name in PACKED:
        lines.append([name, *(microseconds(case[name]["us"]) for case in cases)])
        lines.append(["ratio to the floor", *(f"{case[name]['us'] / case[name]['floor']:.2f}" for case in cases)])
    return "\n".join(_rows(*lines)) + "\n"


def queries() -> str:
    """Microseconds of several queries a row, as speculative decoding asks."""
    cases = results("kv_queries.json")
    lines = [["queries; rows, tokens", *(f"{c['queries']}; {c['rows']}, {_short(c['tokens'])}" for c in cases)]]
    lines += [[name, *(microseconds(case[name]["us"]) for case in cases)] for name in PACKED]
    return "\n".join(_rows(*lines)) + "\n"


def recall(name: str = "kv_recall.json") -> str:
    """Long recalls through each cache, asked evenly and by rank."""
    data = results(name)["cases"]
    skews = sorted({case["skew"] for case in data})
    head: list[Any] = ["average bits", "cache", "outliers"]
    for skew in skews:
        asked = "by rank" if skew else "evenly"
        head += [f"asked {asked}: exact answers", "divergence, x 10^-3"]
    lines: dict[tuple[Any, ...], list[Any]] = {}
    for case in data:
        key = case["bits"], case["cache"], case["gain"]
        line = lines.setdefault(key, [f"{case['bits']:g}", case["cache"], f"{case['gain']:g}" * (case["gain"] > 1)])
        line += [f"{case['right']} of {case['asked']}", f"{case['divergence'] * 1e3:.3g}"]
    order = ("bf16", "bucketed", "uniform", "uniform (not equalised)", "plain int4")
    by = sorted(lines, key=lambda key: (key[0] == 16, key[0], order.index(key[1]), key[2]))
    if all(case["gain"] == 1 for case in data):
        head, lines = head[:2] + head[3:], {key: line[:2] + line[3:] for key, line in lines.items()}
    return "\n".join(_rows(head, *(lines[key] for key in by))) + "\n"


def recall_pairs(name: str) -> str:
    """The bucketed cache less the uniform one, row by row: mean and standard error; rows of a lower divergence."""
    each = {(case["skew"], case["bits"], case["cache"]): case["each"] for case in results(name)["cases"]}
    skews = sorted({skew for skew, *_ in each})
    head: list[Any] = ["average bits"]
    for skew in skews:
        head += [f"{'by rank' if skew else 'evenly'}: answers a row", "divergence, x 10^-3", "rows with a lower one"]
    lines = []
    for bits in sorted({bits for _, bits, cache in each if cache == "bucketed"}):
        line: list[Any] = [f"{bits:g}"]
        for skew in skews:
            both = list(zip(each[skew, bits, "bucketed"], each[skew, bits, "uniform"], strict=True))
            apart = [1e3 * (a[1] - b[1]) for a, b in both]
            line += [_mean([a[0] - b[0] for a, b in both]), _mean(apart), f"{sum(x < 0 for x in apart)} of {len(both)}"]
        lines.append(line)
    return "\n".join(_rows(head, *lines)) + "\n"


def _mean(x: list[float]) -> str:
    """With its standard error."""
    return f"{mean(x):+.2f} ± {stdev(x) / len(x) ** 0.5:.2f}"


def prompts() -> str:
    """Microseconds of pieces of a prompt over a packed past."""
    cases = results("kv_prompts.json")
    lines = [["piece, past", *(f"{_short(case['piece'])}, {_short(case['past'])}" for case in cases)]]
    lines.append(["this package's bf16 kernel", *(microseconds(case["bf16 kernel"]) for case in cases)])
    for name in PACKED:
        for way, words in (("packed", "keys stay packed"), ("unpacked", "the row becomes bf16 first")):
            lines.append([f"{name}; {words}", *(microseconds(case[name][way]["us"]) for case in cases)])
    return "\n".join(_rows(*lines)) + "\n"


def bitdecoding() -> str:
    """Microseconds of one query a row beside BitDecoding, each the mean of two turns."""
    cases = results("kv_bitdecoding.json")
    lines = [["rows, tokens", *(f"{case['rows']}, {_short(case['tokens'])}" for case in cases)]]
    lines.append(["cuDNN, bf16", *(microseconds(case["cuDNN bf16"]) for case in cases)])
    for name, key in (("BitDecoding, 4 bits", "BitDecoding 4 bits"), ("4 bits", "4 bits"), ("2 bits", "2 bits")):
        lines.append([name, *(microseconds(sum(case[key]["us"]) / len(case[key]["us"])) for case in cases)])
    return "\n".join(_rows(*lines)) + "\n"


def first_token() -> str:
    """Milliseconds to the first token of a prompt, and to the last of a few, by KV cache."""
    data = results("qwen3_first_token.json")
    cases = {(case["way"], case["tokens"]): case for case in data["cases"]}
    lengths = sorted({tokens for _, tokens in cases})
    lines = [["tokens of the prompt", *(f"{tokens:,}" for tokens in lengths)]]
    for way in dict.fromkeys(way for way, _ in cases):
        form, _, eager = way.partition(" ")
        name = "bf16 cache" if form == "paged" else f"{form} bits"
        times = ((cases[way, tokens][key] * 1e3 for key in ("first_s", "later_s")) for tokens in lengths)
        lines.append([f"{name}, {eager or 'captured'}", *(f"{first:.1f}; {later:.1f}" for first, later in times)])
    where = f"{data['machine']['name']}, torch {data['versions']['torch']}, {data['layers']} layers"
    return "\n".join([*_rows(*lines), "", f"{where}; medians of {data['rounds']}."]) + "\n"


def steps() -> str:
    """Milliseconds of decode steps of the whole model, and the memory that they take."""
    data = results("qwen3_kv.json")
    lines: list[list[Any]] = [["rows, tokens", "cache", "ms a step", "tokens/s", "cache, GiB", "peak, GiB"]]
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for case in data["cases"]:
        if "error" in case:  # no room
            continue
        key = case["rows"], case["tokens"], case["kv"], case["bits"]
        if key not in best or case["step_s"] < best[key]["step_s"]:
            best[key] = case
    for case in best.values():
        cache = "bf16" if case["bits"] is None else f"{case['bits']:g} bits"
        lines.append(
            [
                f"{case['rows']}, {case['tokens']:,}" + (", drawn" if case["from"] == "drawn" else ""),
                cache,
                f"{case['step_s'] * 1e3:.2f}",
                f"{case['rows'] / case['step_s']:,.0f}",
                f"{case['cache_bytes'] / 2**30:.1f}",
                f"{case['peak_bytes'] / 2**30:.1f}",
            ]
        )
    where = f"{data['machine']['name']}, torch {data['versions']['torch']}, {data['layers']} layers."
    return "\n".join([*_rows(*lines), "", where]) + "\n"
