"""What the command-line programs share: options, errors as one message, progress bars, an engine ready, tables."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from ttnn_moe.command_line import guarded, run_app
from ttnn_moe.errors import RequestError
from ttnn_moe.kv.formats import PAGED
from ttnn_moe.tables import console_of
from ttnn_moe.visible import visible

from .runtime.engine import Engine
from .runtime.generate import engine_for, generate
from .runtime.language_model import LanguageModel

Backend = Annotated[str, typer.Option(help="What runs the experts: auto, reference, ...")]
Device = Annotated[
    str | None, typer.Option(help="torch device, or emulator on tenstorrent; default: what suits the backend.")
]
KV = Annotated[
    str, typer.Option(help="KV cache: paged (the model's dtype), bucketed (quantised), or bfloat8_b (on tenstorrent).")
]
KVBits = Annotated[float | None, typer.Option(help="With --kv bucketed: average bits of a number.", show_default="4")]
Weights = Annotated[
    str | None,
    typer.Option(
        help="On tenstorrent: formats, as bfloat8_b, or bfloat4_b,bfloat8_b (gate and up, down), then of other "
        "matrices as attention=bfloat8_b,head=bfloat8_b, of layers as gate_up@0-1=bfloat8_b.",
        show_default="bfloat16",
    ),
]
ExpertsOn = Annotated[
    str | None,
    typer.Option(
        help="On a mesh: placed (whole experts on each chip), split (a part of every expert on each chip), or auto "
        "(split where a decode step visits fewer than 2 experts a chip).",
        show_default="placed",
    ),
]
Mesh = Annotated[str | None, typer.Option(help="Chips of backend tenstorrent, as 1x8.", show_default="1x1")]


def run(app: typer.Typer, args: Sequence[str] | None, name: str) -> int:
    """Run a typer application and return its exit code; what goes wrong is one message on stderr.

    Args:
        args: the command line, without the program's name; None = that of this process.
    """
    return guarded(lambda: run_app(app, sys.argv[1:] if args is None else args, name))


@contextmanager
def spelled(*names: str) -> Iterator[None]:
    """Errors of the block name these options as the command line does: kv_bits=3 becomes --kv-bits=3."""
    pattern = re.compile(rf"(?<![\w-])(?:{'|'.join(names)})(?![\w-])")

    def spell(part: str) -> str:
        return pattern.sub(lambda match: "--" + match[0].replace("_", "-"), part)

    try:
        yield
    except RequestError as error:
        got, expected = (spell(part) if isinstance(part, str) else part for part in (error.got, error.expected))
        remedy = None if error.remedy is None else spell(error.remedy)
        raise RequestError(spell(error.what), got=got, expected=expected, remedy=remedy) from error


@contextmanager
def loading(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar of bytes; yields what `load_model` takes as `progress`."""
    with _bar(what, DownloadColumn(), TransferSpeedColumn()) as progress:
        yield progress


@contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar of steps; yields what `Engine.capture` takes as `progress`."""
    with _bar(what, MofNCompleteColumn()) as progress:
        yield progress


@contextmanager
def _bar(what: str, *columns: ProgressColumn) -> Iterator[Callable[[int, int], None]]:
    """On stderr, and on a terminal only."""
    console = console_of(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *columns)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(visible(what), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def warmed_up(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    kv: str = PAGED,
    kv_bits: float | None = None,
    memory: int | None = None,
) -> tuple[Engine, float]:
    """An engine for these prompts, with its kernels compiled and its steps captured; and the seconds that this took.

    Args:
        max_new_tokens, kv, kv_bits, memory: as engine_for.
    """
    start = time.perf_counter()
    engine = engine_for(model, prompts, max_new_tokens, kv, kv_bits, memory)
    with counting("capturing decode steps") as captured:
        engine.capture(captured)
    generate(model, prompts, max_new_tokens=min(2, max_new_tokens), stop_ids=(), engine=engine)
    return engine, time.perf_counter() - start


def text(words: str) -> Text:
    """The words as they are: neither rich's markup nor control characters in them act."""
    return Text(visible(words))


def write(words: str, console: Console) -> None:
    """Write generated text at once: as it is to a file or a pipe, without control characters to a terminal."""
    console.file.write(visible(words) if console.is_terminal else words)
    console.file.flush()


def table(title: str, rows: Mapping[str, str]) -> Table:
    """Two columns: what, and how much."""
    out = Table(title=text(title), title_justify="left", show_header=False)
    out.add_column()
    out.add_column(justify="right")
    for name, value in rows.items():
        out.add_row(text(name), text(value))
    return out


def seconds(value: float) -> str:
    """A time for people: ms below one second."""
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"
