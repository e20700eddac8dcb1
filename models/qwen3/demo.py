"""Generate text: ttnn-moe generate [--model DIR] [--prompt TEXT ...] [--backend NAME]."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel

from ttnn_moe import registry
from ttnn_moe.command_line import needs
from ttnn_moe.errors import RequestError
from ttnn_moe.kv.formats import PAGED, check_format
from ttnn_moe.tables import console_of
from ttnn_moe.visible import shown

from . import TINY, terminal, tt
from .config import Qwen3MoeConfig
from .files import MOST_BYTES
from .parallel.command import generate_shared
from .parallel.load import check_exchange
from .runtime.generate import Generation, capacity_for, generate
from .runtime.language_model import LanguageModel
from .runtime.requests import Options, Stats, Token, make_requests
from .split import KINDS
from .tokenizer import Tokenizer
from .tt import request
from .weights import load_model

STDIN = "-"
"""The prompt that stands for standard input."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def demo(
    context: typer.Context,
    model: Annotated[
        Path, typer.Option(help="Checkpoint in Hugging Face format.", show_default="the bundled tiny one")
    ] = TINY,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            help="Text to continue or answer, or - for what standard input holds; several make a batch.",
            show_default="with the bundled checkpoint: an example of each of its tasks",
        ),
    ] = None,
    backend: terminal.Backend = "auto",
    device: terminal.Device = None,
    mesh: terminal.Mesh = None,
    trace: Annotated[
        bool | None,
        typer.Option(help="On tenstorrent: replay decode steps as ttnn traces.", show_default="where the device can"),
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="On tenstorrent: time each operator.")] = False,
    weights: terminal.Weights = None,
    experts: terminal.ExpertsOn = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16, float32; or bf16, fp16, fp32; default: the checkpoint's.")
    ] = None,
    kv: terminal.KV = PAGED,
    kv_bits: terminal.KVBits = None,
    max_new_tokens: Annotated[int, typer.Option(help="Per prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="With --temperature: keep the k most probable tokens; 0 = all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="With --temperature: keep the fewest tokens that reach this probability.")
    ] = 1.0,
    seed: Annotated[
        int | None, typer.Option(help="With --temperature: same seed, same text; prompt i draws from seed + i.")
    ] = None,
    chat: Annotated[bool, typer.Option(help="Wrap prompts in the checkpoint's chat template.")] = True,
    parallel: Annotated[
        str | None, typer.Option(help="Under torchrun: what its processes share, experts or tensor.")
    ] = None,
    exchange: Annotated[str, typer.Option(help="With --parallel experts: as ExpertParallel's.")] = "auto",
) -> None:
    """Generate text with a Qwen3-MoE checkpoint, and show how fast; on stderr where stdout is no terminal."""
    console = console_of()
    # what a program reads is the text alone
    report = console if console.is_terminal else console_of(stderr=True)
    # every check comes before the weights are read
    config = Qwen3MoeConfig.from_directory(model)
    tokenizer = Tokenizer.from_directory(model)
    texts = _texts(prompt, parallel is None) if prompt else _task_prompts(model)
    ids = [_encode(tokenizer, text, chat) for text in texts]
    asked = Options(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    with terminal.spelled(*asked, "kv", "kv_bits"):
        make_requests(config, ids, **asked)
        check_format(kv, kv_bits)
        capacity_for(max(map(len, ids)) + max_new_tokens, config.max_position_embeddings, kv, kv_bits)
    if temperature == 0:
        needs(context, "a --temperature above 0", "top_k", "top_p", "seed")
    options = request.Options(mesh, device, dtype, trace, profile, weights, experts, kv)
    if parallel is not None:
        _check_parallel(parallel, exchange, device)
        options.refuse(backend, parallel)
        shared = generate_shared(model, parallel, ids, tokenizer, asked, backend, device, dtype, exchange, kv, kv_bits)
        if shared.rank == 0:
            with _Single(console) if len(texts) == 1 else _Batch(console, texts) as screen:
                for i, answer in enumerate(shared.texts):
                    screen.show(Token(i, -1, answer))
            where = f"{shared.size} processes, {parallel} shared, on {shared.where}"
            report.print(terminal.table(where, _speeds(shared.stats)))
        return
    _check_alone(exchange)
    on_chips = request.asked_for(backend, device)
    D = request.check(config, len(texts), options) if on_chips else options.refuse(backend)
    start = time.perf_counter()
    network: LanguageModel
    with terminal.loading(f"loading {model.name}") as progress:
        if on_chips:
            request.quiet()
            split, traced = request.splits(config, len(texts), options), False if profile else trace
            network = tt.load_model(model, D, device, progress, traced, weights=weights, split=split)
        else:
            network = load_model(model, backend, device, dtype, progress)
    load_s = time.perf_counter() - start
    engine, warm_up_s = terminal.warmed_up(network, ids, max_new_tokens, kv, kv_bits)
    screen = _Single(console) if len(texts) == 1 else _Batch(console, texts)
    with screen, request.profiled(network, profile) as times:
        result = generate(network, ids, tokenizer=tokenizer, on_token=screen.show, engine=engine, **asked)
    name = request.NAME if on_chips else registry.resolve(backend, network.device.type)
    where = f"{name} on {network.where}, {str(network.dtype).removeprefix('torch.')}"
    report.print(terminal.table(where, _figures(result, load_s, warm_up_s)))
    if times is not None:
        report.print(terminal.table("operator (calls), each waited for", times.rows()))


def _check_parallel(kind: str, exchange: str, device: str | None) -> None:
    if kind not in KINDS[1:]:
        raise RequestError("ranks cannot share that", got=shown(kind), expected=f"one of {list(KINDS[1:])}")
    check_exchange(exchange)
    if device is not None and ":" in device:
        raise RequestError(
            "each process takes a device of its own, by LOCAL_RANK",
            got=f"--device {shown(device)}",
            remedy="leave the number out",
        )
    if kind != "experts":
        _refuse_exchange(exchange, f"--parallel {kind}")


def _check_alone(exchange: str) -> None:
    _refuse_exchange(exchange, "no --parallel")
    if (os.environ.get("WORLD_SIZE") or "1") != "1":
        raise RequestError(
            "every process would generate the same",
            got=f"{os.environ['WORLD_SIZE']} processes of torchrun and no --parallel",
            remedy="add --parallel experts or --parallel tensor, or start one process without torchrun",
        )


def _refuse_exchange(exchange: str, given: str) -> None:
    if exchange != "auto":
        raise RequestError(
            "--exchange is of --parallel experts",
            got=f"--exchange {shown(exchange)} and {given}",
            remedy="leave it out, or give --parallel experts",
        )


def _texts(prompts: Sequence[str], alone: bool) -> list[str]:
    """The prompts, with standard input in place of "-". alone: one process runs the command."""
    if STDIN not in prompts:
        return list(prompts)
    if not alone or prompts.count(STDIN) > 1:
        raise RequestError(
            "standard input is one prompt of one process",
            got=f"--prompt {STDIN} " + ("twice" if alone else "and --parallel"),
            remedy="give the text itself",
        )
    return [_of_stdin() if prompt == STDIN else prompt for prompt in prompts]


def _of_stdin() -> str:
    """The whole text of standard input, without its last newline."""
    data = sys.stdin.buffer.read(MOST_BYTES + 1) if sys.stdin is not None else b""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise RequestError("standard input is not UTF-8 text", got=str(error)) from None
    if len(data) > MOST_BYTES or not text:
        got = f"more than {MOST_BYTES} bytes" if text else "nothing"
        raise RequestError("standard input is no prompt", got=got, expected="one text")
    return text.removesuffix("\n").removesuffix("\r")


def _task_prompts(model: Path) -> list[str]:
    """One held-out example of each task that the bundled checkpoint was trained on."""
    if model.resolve() != TINY.resolve():
        raise RequestError(
            "nothing to generate from",
            got="no --prompt",
            remedy="give one or more --prompt TEXT; --prompt - reads standard input",
        )
    from .tiny import tasks

    options: dict[str, dict[str, Any]] = {"recall": {"context": (60, 100)}}
    return [tasks.examples(t, "heldout", 1, **options.get(t, {}))[0].prompt for t in tasks.TASKS]


def _encode(tokenizer: Tokenizer, text: str, chat: bool) -> list[int]:
    if not chat:
        return tokenizer.encode(text)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    return tokenizer.encode(rendered, add_special_tokens=False)


def _figures(result: Generation, load_s: float, warm_up_s: float) -> dict[str, str]:
    stats: Stats = result.stats
    rows = {
        "load": terminal.seconds(load_s),
        "compile and warm up": terminal.seconds(warm_up_s),
        "prompt tokens": f"{stats.prompt_tokens} in {len(result.tokens)} prompts",
    }
    return {**rows, **_speeds(stats)}


def _speeds(stats: Stats) -> dict[str, str]:
    rows = {"new tokens": str(stats.new_tokens), "time to first token": terminal.seconds(stats.first_token_s)}
    if stats.decode_steps:
        rows["tokens/s/user"] = f"{stats.tokens_per_s_user:.1f}"
        rows["tokens/s"] = f"{stats.tokens_per_s:.1f}"
    return rows


class _Single:
    """One answer, written piece by piece; nothing but the text goes to stdout until it ends."""

    def __init__(self, console: Console):
        self.console = console

    def __enter__(self) -> _Single:
        return self

    def __exit__(self, *exc: object) -> None:
        self.console.print()

    def show(self, token: Token) -> None:
        terminal.write(token.text, self.console)


class _Batch:
    """One panel per prompt, growing in place on a terminal, printed at the end elsewhere."""

    def __init__(self, console: Console, prompts: Sequence[str]):
        self.prompts, self.answers = prompts, ["" for _ in prompts]
        self.live = Live(console=console, refresh_per_second=12, get_renderable=self._render)

    def __enter__(self) -> _Batch:
        self.live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.live.vertical_overflow = "visible"  # the last frame is not cut to the height of the terminal
        self.live.stop()
        if not self.live.console.is_terminal:
            self.live.console.print()  # rich ends the frame without a newline there

    def show(self, token: Token) -> None:
        self.answers[token.sequence] += token.text

    def _render(self) -> Group:
        pairs = zip(self.prompts, self.answers, strict=True)
        panels = ((terminal.text(answer), terminal.text(prompt[-60:])) for prompt, answer in pairs)
        return Group(*(Panel(answer, title=title, title_align="left") for answer, title in panels))


def main(args: Sequence[str] | None = None) -> int:
    """Run the demo with these arguments (default: the command line); returns the exit code."""
    return terminal.run(app, args, "ttnn-moe generate")


if __name__ == "__main__":
    sys.exit(main())
