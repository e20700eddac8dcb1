"""Qwen3-30B-A3B on several GPUs through vLLM: tensor parallel, and data parallel with expert parallelism.

    PYTHONPATH=. python benchmarks/vllm_ranks.py --json vllm_ranks.json
    PYTHONPATH=. python benchmarks/vllm_ranks.py --dry-run  # needs no GPU

The model and the requests of vllm_serve.py; every split holds the same weights, so tokens are compared. They lie
beside the JSON file. With data parallelism, rank r serves requests r, r + N and so on, in a process of its own. Engines
of one group load at the same time, each with its own KV cache, and are measured one after the other.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import vllm_serve as serve
from command_line import Json, run_script
from need_gpu import need_gpu, need_vllm

SPLITS = {"tp": "tensor parallel", "dp": "data parallel, with expert parallelism"}
KV_GIB = 6
"""Of one GPU: 256 requests fit, and three engines at a time."""
SIZES = "1,2,4,8,16,24,32,64,96,128,160,192,224,256"
POLL_S = 0.002
# NVLink multicast is left alone: a program that fails with it can take the GPUs of others along
ONE_HOST = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True)
class Engine:
    """One engine: a kind of vllm_serve.py, split in one way over so many GPUs."""

    kind: str
    split: str
    gpus: int

    @property
    def name(self) -> str:
        return f"{self.split}_{self.kind}"

    @property
    def processes(self) -> int:
        return self.gpus if self.split == "dp" else 1

    def options(self) -> dict[str, Any]:
        """Arguments of vllm.LLM."""
        split = {"tensor_parallel_size": self.gpus} if self.split == "tp" else {"enable_expert_parallel": True}
        # other engines lie on the same GPUs, so vLLM may not take what it finds free
        memory = {"kv_cache_memory_bytes": KV_GIB << 30, "gpu_memory_utilization": 0.05}
        return {**split, **memory, "max_num_batched_tokens": 8192}

    def environment(self, rank: int, port: int) -> dict[str, str]:
        if self.split == "tp":  # all requests are there before the first step, so every round has the same steps
            return {**ONE_HOST, **serve.IN_PROCESS}
        ranks = {"VLLM_DP_RANK": rank, "VLLM_DP_RANK_LOCAL": rank, "VLLM_DP_SIZE": self.gpus}
        place = {"VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": port}
        return {**ONE_HOST, **{name: str(value) for name, value in {**ranks, **place}.items()}}


# one process of an engine


def wait_for(files: list[Path], seconds: float) -> None:
    until = time.time() + seconds
    while not all(file.exists() for file in files):
        if time.time() > until:
            raise TimeoutError(f"waited {seconds:.0f} s for {[file.name for file in files if not file.exists()]}")
        time.sleep(POLL_S)


@dataclass
class Member:
    """One of an engine's processes. All begin each run together."""

    folder: Path
    rank: int
    of: int
    runs: int = 0

    def together(self, name: str = "") -> None:
        self.runs += 1
        at = [self.folder / f"{name or self.runs}.{rank}" for rank in range(self.of)]
        at[self.rank].touch()
        wait_for(at, 120)

    def measure(self, run: serve.Run, rounds: int, steps: list[int], about: dict[str, Any]) -> None:
        """Results are written after each figure."""
        todo = serve.requests()[self.rank :: self.of]
        found: dict[str, Any] = {**about, "rounds": [], "tokens": [], "steps_s": {}, "steps_again": {}}

        def timed(asked: list[serve.Request]) -> tuple[float, float, list[list[int]]]:
            self.together()
            start = time.time()
            _, tokens = run(asked)
            return start, time.time(), tokens

        def keep() -> None:
            new = self.folder / f"new.{self.rank}"
            new.write_text(json.dumps(found))
            new.rename(self.folder / f"found.{self.rank}")

        def round_of_all() -> None:
            start, end, tokens = timed(todo)
            found["rounds"].append((start, end))
            found["tokens"].append(tokens)
            keep()

        timed([(prompt, 2) for prompt, _ in todo])
        round_of_all()
        round_of_all()
        for B in steps:
            texts = [(prompt * 8)[:128] for prompt, _ in todo[: B // self.of]]
            # the first of four may compile
            runs = [[timed([(text, new) for text in texts]) for _ in range(4)][1:] for new in (1, 65)]
            took = [[(start, end) for start, end, _ in some] for some in runs]
            found["steps_again"][B] = min(serve.agreement(runs[1][0][2], one[2])["positions"] for one in runs[1])
            found["steps_s"][B] = took
            keep()
        for _ in range(rounds - 2):
            round_of_all()
        (self.folder / f"done.{self.rank}").touch()


def member(engine: Engine, folder: Path, rank: int, rounds: int, steps: list[int], layers: int, sizes: str) -> None:
    """Load, wait until the others are ready and this engine's turn has come, measure."""
    start, config = time.time(), folder / f"config.{rank}"
    config.mkdir()
    rows = serve.COUNT // engine.processes
    captured = [size for size in serve.numbers(sizes) if size <= rows]
    run, _, about = serve.vllm_run(rows, layers, config, captured, **engine.options())
    about["ready_s"] = time.time() - start
    (folder / f"ready.{rank}").touch()
    wait_for([folder / "go"], 600)
    Member(folder, rank, engine.processes).measure(run, rounds, steps, about)


# all of them


def merged(engine: Engine, parts: list[dict[str, Any]], layers: int) -> dict[str, Any]:
    """The result of an engine from those of its processes: from the first start to the last end."""

    def seconds(runs: list[list[float]]) -> float:
        return max(end for _, end in runs) - min(start for start, _ in runs)

    def tokens(index: int) -> list[list[int]]:
        out: list[list[int]] = [[] for _ in range(sum(len(part["tokens"][index]) for part in parts))]
        for rank, part in enumerate(parts):
            out[rank :: len(parts)] = part["tokens"][index]
        return out

    def step(B: str) -> float:
        first, whole = (
            [seconds([part["steps_s"][B][which][i] for part in parts]) for i in range(3)] for which in (0, 1)
        )
        return (statistics.median(whole) - statistics.median(first)) / 64 * 1e3

    rounds = min(len(part["rounds"]) for part in parts)
    took = [seconds([part["rounds"][i] for part in parts]) for i in range(rounds)]
    steps = set.intersection(*(set(part["steps_s"]) for part in parts))
    about = {key: parts[0][key] for key in ("vllm", "batched_tokens", "graphs", "blocks")}
    return {
        **{"kind": engine.kind, "split": engine.split, "gpus": engine.gpus, "layers": layers, **about},
        **{"rows": serve.COUNT, "ready_s": max(part["ready_s"] for part in parts)},
        **serve.of_rounds(took),
        "steps_ms": {B: step(B) for B in sorted(steps, key=int)},
        "steps_again": {B: min(part["steps_again"][B] for part in parts) for B in sorted(steps, key=int)},
        "tokens_again": agreement_of_all([tokens(i) for i in range(rounds)]),
        "tokens": tokens(0),
    }


def agreement_of_all(rounds: list[list[list[int]]]) -> dict[str, float]:
    """Of the first round with that which agrees least."""
    return min((serve.agreement(rounds[0], one) for one in rounds[1:] or rounds), key=lambda found: found["positions"])


def compared(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with tokens compared: with those of every engine."""
    named = {f"{row['split']}_{row['kind']}": row["tokens"] for row in results}
    return [
        {**row, "tokens_as": {name: serve.agreement(row["tokens"], named[name]) for name in named}} for row in results
    ]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Started:
    """An engine's processes, each with its workers a process group."""

    def __init__(self, engine: Engine, folder: Path, options: list[str], found: Path):
        self.engine, self.folder, self.port = engine, folder, free_port()
        folder.mkdir()
        self.processes = [self._start(rank, options, found) for rank in range(engine.processes)]

    def _start(self, rank: int, options: list[str], found: Path) -> subprocess.Popen[bytes]:
        words, environment = command(self.engine, self.folder, rank, self.port, options, found)
        with (self.folder / f"log.{rank}").open("wb") as log:
            return subprocess.Popen(
                words, env={**os.environ, **environment}, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self, what: str, until: float) -> bool:
        """Whether all processes wrote that file in time."""
        files = [self.folder / f"{what}.{rank}" for rank in range(len(self.processes))]
        while not all(file.exists() for file in files):
            if time.time() > until or any(process.poll() for process in self.processes):
                return False
            time.sleep(0.1)
        return True

    def parts(self) -> list[dict[str, Any]]:
        files = [self.folder / f"found.{rank}" for rank in range(len(self.processes))]
        return [json.loads(file.read_text()) for file in files if file.exists()]

    def end(self) -> None:
        for process in self.processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()

    def tail(self) -> str:
        return "\n".join(
            f"-- {self.folder.name} rank {rank}\n" + (self.folder / f"log.{rank}").read_text(errors="replace")[-3000:]
            for rank in range(len(self.processes))
        )


def command(
    engine: Engine, folder: Path, rank: int, port: int, options: list[str], found: Path
) -> tuple[list[str], dict[str, str]]:
    """What runs one process of an engine, and what its environment has beside ours."""
    (_, script, *words), environment = serve.command(engine.kind, [serve.COUNT], options, found)
    assert words[:2] == ["--kinds", engine.kind]
    mine = ["--engines", f"{engine.split}:{engine.kind}", "--gpus", str(engine.gpus), "--part", str(folder)]
    words = [sys.executable, str(Path(script).with_name("vllm_ranks.py")), *mine, "--rank", str(rank), *options]
    cache = {"VLLM_CACHE_ROOT": str(found.parent / "cache" / engine.name)}  # each compiles by itself
    return words, {**environment, **engine.environment(rank, port), **cache}


def group(
    engines: list[Engine], folder: Path, options: list[str], found: Path, load: float, limit: float
) -> Iterator[tuple[Engine, list[dict[str, Any]]]]:
    """Load these engines at the same time, measure one after the other."""
    until = time.time() + load
    started = [Started(engine, folder / engine.name, options, found) for engine in engines]
    try:
        ready = [one.wait("ready", until) for one in started]
        for one, up in zip(started, ready, strict=True):
            if not up:
                one.end()
        for one, up in zip(started, ready, strict=True):
            if up:
                (one.folder / "go").touch()
                up = one.wait("done", time.time() + limit)
            if not up:
                typer.echo(f"{one.engine.name} did not end\n{one.tail()}", err=True)
            if len(parts := one.parts()) == len(one.processes):
                yield one.engine, parts
            one.end()
    finally:
        for one in started:
            one.end()


def main(
    engines: Annotated[str, typer.Option(help="SPLIT:KIND, a list.")] = "tp:model,dp:model,tp:vllm,dp:experts",
    gpus: Annotated[int, typer.Option(help="Of this machine.")] = 2,
    together: Annotated[int, typer.Option(help="Engines that load at the same time.")] = 3,
    rounds: Annotated[int, typer.Option(help="Times that the requests are run; at least 2.")] = 2,
    steps: Annotated[str, typer.Option(help="Batches whose decode step is timed, of all GPUs.")] = "2,8,32,128",
    layers: Annotated[int, typer.Option(help="Of the model.")] = 48,
    sizes: Annotated[str, typer.Option(help="Of vLLM's graphs.")] = SIZES,
    load: Annotated[float, typer.Option(help="Seconds for a group to load.")] = 600,
    limit: Annotated[float, typer.Option(help="Seconds to measure one engine.")] = 600,
    json_file: Json = None,
    logs: Annotated[Path | None, typer.Option(help="Keep the engines' logs here.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run.")] = False,
    part: Annotated[Path | None, typer.Option(hidden=True)] = None,
    rank: Annotated[int, typer.Option(hidden=True)] = 0,
) -> None:
    """Measure, write JSON, print a line an engine."""
    chosen = [Engine(kind, split, gpus) for split, kind in (word.split(":") for word in engines.split(","))]
    for one in chosen:
        if one.split not in SPLITS or one.kind not in set(serve.KINDS) - {"ours"}:
            raise typer.BadParameter(f"{one.split}:{one.kind}", param_hint="--engines")
    if part is not None:
        member(chosen[0], part, rank, rounds, serve.numbers(steps), layers, sizes)
        return
    if not dry_run:
        need_gpu()
        need_vllm()
        # so that the engines are ended too
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))
    options = ["--rounds", str(rounds), "--steps", steps, "--layers", str(layers), "--sizes", sizes]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) if logs is None else logs
        folder.mkdir(parents=True, exist_ok=True)
        found = serve.entry_points(Path(made) / "site")
        results: list[dict[str, Any]] = []
        for first in range(0, len(chosen), together):
            some = chosen[first : first + together]
            if dry_run:
                for one in some:
                    for process in range(one.processes):
                        words, environment = command(one, folder / one.name, process, 0, options, found)
                        shown = " ".join(f"{name}={value}" for name, value in environment.items())
                        typer.echo(f"{shown} {' '.join(words)}")
                continue
            for engine, parts in group(some, folder, options, found, load, limit):
                results.append(merged(engine, parts, layers))
                last = compared(results)[-1]
                typer.echo(json.dumps({key: value for key, value in last.items() if key != "tokens"}))
                if json_file is not None:
                    serve.write(json_file, compared(results))


if __name__ == "__main__":
    run_script(main)
