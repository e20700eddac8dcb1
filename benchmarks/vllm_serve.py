"""Requests through vLLM, vLLM with this package's experts or whole model, and this package's engine: one machine.

    PYTHONPATH=. python benchmarks/vllm_serve.py --json vllm_serve.json
    PYTHONPATH=. python benchmarks/vllm_serve.py --kinds experts --rows 256 --json vllm_serve.json  # adds to the file
    PYTHONPATH=. python benchmarks/vllm_serve.py --model gpt-oss-120b --kinds vllm,experts --json vllm_gpt_oss.json
    PYTHONPATH=. python benchmarks/vllm_serve.py --dry-run  # needs no GPU

Qwen3-30B-A3B in bf16 with the random weights of qwen3_gpu.py, or gpt-oss in MXFP4 with random ones. The 256 requests
are those of qwen3_engine.py, all there at the start; greedy, every request to its last token. Each kind and number of
rows runs in a process of its own; with --together, vLLM's smaller numbers of rows are set on the scheduler of the
largest. Steps: whole generations of a batch less those that end with the first token. Prefills: prompts one after
another, then each on a rested GPU, which its power limit lets run faster. Tokens of every kind are compared with
vLLM's. They lie beside the JSON file.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from command_line import Json, numbers, run_script
from command_line import write as write_json
from need_gpu import need_gpu, need_vllm
from qwen3_engine import draw, spread
from qwen3_gpu_tables import REST
from vllm_models import CONFIGS, OURS_TOO
from vllm_random import FORMAT

ROOT = Path(__file__).parent.parent
KINDS = {"vllm": "off", "experts": "experts", "model": "model", "ours": "off"}
"""Kind -> TTNN_MOE_VLLM."""
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
PROMPT, NEW, VOCAB, COUNT = (32, 1024), (16, 256), CONFIGS[OURS_TOO]["vocab_size"], 256
TOTALS = 77_351, 35_988
VLLMS, OURS = 8192, PROMPT[1] + NEW[1]
"""Longest sequence: vLLM takes KV blocks on demand; pages of ours are as many as the rows want. qwen3_gpu.py has longer
prompts of ours."""
Request = tuple[list[int], int]
Run = Callable[[list[Request]], tuple[float, list[list[int]]]]
"""Requests -> seconds, and the new tokens of each."""
Limit = Callable[[int], None]
"""Rows from now on."""


@dataclass(frozen=True)
class Asked:
    """What is measured beside rounds.

    Attributes:
        steps, prefill: batches, and tokens of prompts. limit: seconds, 0: any. sizes: of graphs; none: vLLM's own.
    """

    steps: list[int] = field(default_factory=list)
    prefill: list[int] = field(default_factory=list)
    limit: float = 0
    sizes: list[int] = field(default_factory=list)


def requests() -> list[Request]:
    """Those of qwen3_engine.py."""
    found = draw(COUNT, PROMPT, NEW, VOCAB, 0)
    totals = sum(len(prompt) for prompt, _ in found), sum(new for _, new in found)
    assert totals == TOTALS, f"other requests than those measured before: {totals}"
    return found


# one engine


def vllm_run(
    rows: int, layers: int, folder: Path, sizes: list[int], model: str = OURS_TOO, **options: Any
) -> tuple[Run, Limit, dict[str, Any]]:
    """vLLM's offline engine, with graphs, prefix cache and asynchronous scheduling as it sets them.

    Args:
        model: of CONFIGS. options: more of vllm.LLM.
    """
    import vllm

    (folder / "config.json").write_text(json.dumps({**CONFIGS[model], "num_hidden_layers": layers}))
    llm = vllm.LLM(
        model=str(folder),
        load_format=FORMAT,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=VLLMS,
        max_num_seqs=rows,
        seed=0,
        **({"compilation_config": {"cudagraph_capture_sizes": sizes}} if sizes else {}),
        **options,
    )

    def run(todo: list[Request]) -> tuple[float, list[list[int]]]:
        llm.reset_prefix_cache()
        given = [{"prompt_token_ids": prompt} for prompt, _ in todo]
        options = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        wanted = [vllm.SamplingParams(max_tokens=new, **options) for _, new in todo]
        start = time.perf_counter()
        out = llm.generate(given, wanted, use_tqdm=False)
        return time.perf_counter() - start, [list(one.outputs[0].token_ids) for one in out]

    def limit(fewer: int) -> None:
        if fewer != rows:  # in this process alone: IN_PROCESS
            llm.llm_engine.engine_core.engine_core.scheduler.max_num_running_reqs = fewer

    config = llm.llm_engine.vllm_config
    return (
        run,
        limit,
        {
            "vllm": vllm.__version__,
            "batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "graphs": str(config.compilation_config.cudagraph_mode),
            "blocks": config.cache_config.num_gpu_blocks,
        },
    )


def our_run(rows: int, layers: int) -> tuple[Run, Limit, dict[str, Any]]:
    """This package's engine."""
    import dataclasses

    import torch
    from qwen3_gpu import make

    from ttnn_moe.models.qwen3 import Engine
    from ttnn_moe.models.qwen3.config import config_of

    sizes = dataclasses.replace(config_of("qwen3-30b-a3b"), num_hidden_layers=layers)
    engine = Engine(make(sizes, "cuda", torch.bfloat16, "auto", 0), rows, OURS)
    engine.capture()

    def run(todo: list[Request]) -> tuple[float, list[list[int]]]:
        start = time.perf_counter()
        made = {engine.add(prompt, max_new_tokens=new, stop_ids=()): [] for prompt, new in todo}
        while engine.busy:
            for token in engine.step():
                made[token.sequence].append(token.token)
        return time.perf_counter() - start, list(made.values())

    return run, lambda rows: None, {"prefill_chunk": engine.scheduler.chunk.most, "pages": engine.cache.total}


def of_rounds(took: list[float]) -> dict[str, Any]:
    """Of the seconds of each round. The first of several warms up: vLLM compiles kernels in it."""
    counted = took[1:] or took
    seconds = statistics.median(counted)
    return {"seconds": seconds, "new_tokens_per_s": TOTALS[1] / seconds, "all_s": took, "spread_s": spread(counted)}


def measured(
    run: Run, rows: int, rounds: int, asked: Asked, longest: int, keep: Callable[[dict[str, Any]], None], until: float
) -> None:
    """Rounds of all requests; decode steps and prefills of what fits into the rows and the longest sequence.

    Args:
        keep: gets what was found, after each figure. until: no figure begins after that time.
    """
    todo, served = requests(), []
    run([(prompt, 2) for prompt, _ in todo])  # kernels that compile while they serve
    found: dict[str, Any] = {"steps_ms": {}, "prefill_ms": {}, "rested_prefill_ms": {}}

    def round_of_all() -> None:
        served.append(run(todo))
        assert [len(made) for made in served[-1][1]] == [new for _, new in todo], "every request has all its tokens"
        found.update(of_rounds([seconds for seconds, _ in served]))
        again = [agreement(served[0][1], made) for _, made in served[1:]]
        found.update(tokens=served[0][1], tokens_again=min(again, key=lambda one: one["positions"], default=None))

    def step(B: int) -> None:
        texts = [(prompt * 8)[:128] for prompt, _ in todo[:B]]
        first, whole = ([run([(text, new) for text in texts])[0] for _ in range(3)] for new in (1, 128))
        found["steps_ms"][B] = (statistics.median(whole) - statistics.median(first)) / 127 * 1e3

    def prefill(n: int) -> None:
        text = [token for prompt, _ in todo for token in prompt][:n]

        def first(rest: float) -> float:
            time.sleep(rest)
            return run([(text, 1)])[0]

        for name, rest in (("prefill_ms", 0), ("rested_prefill_ms", REST)):
            found[name][n] = statistics.median(first(rest) for _ in range(5)) * 1e3

    figures = [round_of_all, *(partial(step, B) for B in asked.steps if B <= rows)]
    figures += [partial(prefill, n) for n in asked.prefill if n < longest]
    for figure in [*figures, *[round_of_all] * (rounds - 1)]:
        if time.time() > until:
            break
        figure()
        keep(found)


def one_kind(
    kind: str, counts: list[int], rounds: int, asked: Asked, layers: int, folder: Path, part: Path, **options: Any
) -> None:
    """One engine, at each number of rows, the most first. Results are written after each figure.

    Args:
        options: more of vllm_run.
    """
    start = time.time()
    until = start + asked.limit if asked.limit else float("inf")
    ours, longest = kind == "ours", OURS if kind == "ours" else VLLMS
    engine = our_run(counts[0], layers) if ours else vllm_run(counts[0], layers, folder, asked.sizes, **options)
    run, limit, about = engine
    about["ready_s"] = time.time() - start
    done: list[dict[str, Any]] = []
    for rows in counts:
        limit(rows)

        def keep(found: dict[str, Any], rows: int = rows, before: list[dict[str, Any]] = done) -> None:
            text = json.dumps([*before, {"kind": kind, "rows": rows, "layers": layers, **about, **found}])
            part.with_suffix(".new").write_text(text)
            part.with_suffix(".new").rename(part)

        most = rows == counts[0]
        # kernels that compile while they serve did so at the most rows
        measured(run, rows, rounds if most else max(1, rounds - 1), asked if most else Asked(), longest, keep, until)
        done = json.loads(part.read_text()) if part.exists() else done


# all of them


def agreement(one: list[list[int]], other: list[list[int]]) -> dict[str, float]:
    """Shares of requests whose first tokens are equal, and of positions that are."""
    first = [a[0] == b[0] for a, b in zip(one, other, strict=True)]
    equal = [x == y for a, b in zip(one, other, strict=True) for x, y in zip(a, b, strict=True)]
    return {"first": statistics.fmean(first), "positions": statistics.fmean(equal)}


def compared(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with tokens compared: with vLLM's at these rows, and of vLLM with itself at other rows."""
    base = {row["rows"]: row["tokens"] for row in results if row["kind"] == "vllm"}
    out = []
    for row in results:
        of = base if row["kind"] != "vllm" else {rows: base[rows] for rows in base if rows != row["rows"]}
        other = of.get(row["rows"]) if row["kind"] != "vllm" else next(iter(of.values()), None)
        out.append({**row, "tokens_as_vllm": None if other is None else agreement(row["tokens"], other)})
    return out


def entry_points(folder: Path) -> Path:
    """A folder for PYTHONPATH by which vLLM's processes find this benchmark's plug-in and this package's."""
    names = {"ttnn_moe_bench": "vllm_random:register"}
    if not any(point.name == "ttnn_moe" for point in _installed()):
        names["ttnn_moe"] = "ttnn_moe.integrations.vllm:register"
    info = folder / "ttnn_moe_bench-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ttnn-moe-bench\nVersion: 0\n")
    lines = [f"{name} = {value}\n" for name, value in names.items()]
    (info / "entry_points.txt").write_text("".join(["[vllm.general_plugins]\n", *lines]))
    return folder


def _installed() -> Any:
    from importlib.metadata import entry_points as found

    return found(group="vllm.general_plugins")


def command(kind: str, rows: list[int], options: list[str], folder: Path) -> tuple[list[str], dict[str, str]]:
    """What measures one kind at so many rows, the most first: a command, and what its environment has beside ours."""
    path = [str(folder), str(ROOT), str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "PYTHONPATH": os.pathsep.join(path),
        "TTNN_MOE_VLLM": KINDS[kind],
        "VLLM_PLUGINS": "ttnn_moe,ttnn_moe_bench",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if importlib.util.find_spec("flashinfer") is None:  # vLLM's default sampler is FlashInfer's
        environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    if len(rows) > 1:
        environment |= IN_PROCESS
    return [sys.executable, __file__, "--kinds", kind, "--rows", ",".join(map(str, rows)), *options], environment


def main(
    kinds: Annotated[str, typer.Option(help=f"Of {', '.join(KINDS)}.")] = ",".join(KINDS),
    rows: Annotated[str, typer.Option(help="Requests that run at a time; a list.")] = "32,128,256",
    rounds: Annotated[
        int, typer.Option(help="Runs of the requests: the median is kept, of several without the first.")
    ] = 3,
    steps: Annotated[str, typer.Option(help="Batches whose decode step is timed.")] = "1,8,32,128",
    prefill: Annotated[str, typer.Option(help="Prompts whose first token is timed.")] = "512,4096",
    model: Annotated[str, typer.Option(help=f"Of {', '.join(CONFIGS)}.")] = OURS_TOO,
    layers: Annotated[int, typer.Option(help="Of the model; 0: all.")] = 0,
    attention: Annotated[str, typer.Option(help="vLLM's --attention-backend; default: its choice.")] = "",
    json_file: Json = None,
    together: Annotated[bool, typer.Option("--together", help="One engine a kind of vLLM, for all rows.")] = False,
    limit: Annotated[float, typer.Option(help="Seconds after which a process begins no figure; 0: any.")] = 0,
    sizes: Annotated[str, typer.Option(help="Of vLLM's graphs; default: its own, which take longer to capture.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run.")] = False,
    part: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure, write JSON, print a line a run."""
    chosen, counts = kinds.split(","), sorted(numbers(rows), reverse=True)
    if unknown := set(chosen) - set(KINDS):
        raise typer.BadParameter(f"{sorted(unknown)}: not of {list(KINDS)}", param_hint="--kinds")
    if model not in CONFIGS:
        raise typer.BadParameter(f"{model!r}: not of {list(CONFIGS)}", param_hint="--model")
    if model != OURS_TOO and not set(chosen) <= {"vllm", "experts"}:
        raise typer.BadParameter(f"{model} runs as vllm and experts", param_hint="--kinds")
    layers = layers or CONFIGS[model]["num_hidden_layers"]
    if part is None and not dry_run:
        need_gpu()
        if set(chosen) != {"ours"}:
            need_vllm()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if part is not None:
            asked = Asked(numbers(steps), numbers(prefill), limit, numbers(sizes))
            options = {"model": model, **({"attention_backend": attention} if attention else {})}
            one_kind(chosen[0], counts, rounds, asked, layers, folder, part, **options)
            return
        results = read(json_file)
        if others := {row.get("model", OURS_TOO) for row in results} - {model}:
            raise typer.BadParameter(f"{json_file} has results of {', '.join(sorted(others))}", param_hint="--json")
        entry_points(folder)
        groups = [(kind, [count]) for kind in chosen for count in counts]
        if together:
            alone = [group for group in groups if group[0] == "ours"]
            groups = [(kind, counts) for kind in chosen if kind != "ours"] + alone
        for kind, group in groups:
            out = folder / f"{kind}_{group[0]}.json"
            # steps and prefills once, where every batch fits
            beside = (steps, prefill) if group[0] == max(counts) else ("", "")
            words = ["--rounds", str(rounds), "--steps", beside[0], "--prefill", beside[1], "--layers", str(layers)]
            words += ["--limit", str(limit), "--sizes", sizes, "--model", model, "--attention", attention]
            words, environment = command(kind, group, [*words, "--part", str(out)], folder)
            if dry_run:
                shown = " ".join(f"{name}={value}" for name, value in environment.items())
                typer.echo(f"{shown} {' '.join(words)}")
                continue
            try:
                subprocess.run(
                    words, env={**os.environ, **environment}, timeout=limit + 8 if limit else None, check=True
                )
            except subprocess.SubprocessError as error:
                typer.echo(f"{kind} at {group} rows failed: {error}", err=True)
            for row in json.loads(out.read_text()) if out.exists() else []:
                row["model"] = model
                key = row["kind"], row["rows"]
                results = [old for old in results if (old["kind"], old["rows"]) != key] + [row]
                line = f"{row['new_tokens_per_s']:,.0f} new tokens/s ({row['seconds']:.2f} s)"
                typer.echo(f"{kind} at {row['rows']} rows: {line}")
            if json_file is not None:
                write(json_file, compared(results))
    if dry_run:
        typer.echo(f"{COUNT} requests, {TOTALS[0]:,} prompt and {TOTALS[1]:,} new tokens: {len(requests())} drawn")


def tokens_of(json_file: Path) -> Path:
    """The file beside it that holds the tokens of each result, in the same order."""
    return json_file.with_suffix(".tokens.json")


def read(json_file: Path | None) -> list[dict[str, Any]]:
    """The results that a file has."""
    if json_file is None or not json_file.exists():
        return []
    rows, tokens = json.loads(json_file.read_text())["results"], json.loads(tokens_of(json_file).read_text())
    return [{**row, "tokens": made} for row, made in zip(rows, tokens, strict=True)]


def write(json_file: Path, results: list[dict[str, Any]]) -> None:
    bare = [{key: value for key, value in row.items() if key != "tokens"} for row in results]
    write_json(json_file, {"machine": machine(), "results": bare})
    write_json(tokens_of(json_file), [row["tokens"] for row in results], indent=None)


def machine() -> dict[str, str]:
    """Names and versions."""
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {"gpu": name, "torch": torch.__version__, "cuda": str(torch.version.cuda)}


if __name__ == "__main__":
    run_script(main)
