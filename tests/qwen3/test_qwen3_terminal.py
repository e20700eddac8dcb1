"""What the model's commands write: names and texts act neither as terminal escapes nor as rich's markup."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import typer
from rich.console import Console

from qwen3_checkpoints import make
from qwen3_tokenizers import build
from ttnn_moe.errors import RequestError
from ttnn_moe.models.qwen3 import Token, Tokenizer, demo, generate, load_model, terminal
from ttnn_moe.visible import visible

NASTY = "[bold]a[/red] \x1b]0;title\x07\x9b31m\r\x08\x7f \u202eb\u2066"
CONTROLS = {chr(i) for i in (*range(9), *range(11, 32), *range(127, 160), 0x202E, 0x2066)}


def printed(*renderables: object, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    for one in renderables:
        console.print(one)
    return console.file.getvalue()


def tokens(*pieces: str) -> list[Token]:
    return [Token(0, 1, piece, None) for piece in pieces]


@pytest.mark.parametrize("shown", [True, False])
def test_streamed_text_is_shown_on_a_terminal_and_exact_elsewhere(shown: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=shown)
    pieces = ["a\t", "\x1b", "]0;", "title", "\x07", "\x9b", "31m\r", "\n", "\u202e", "[bold]b[/]"]
    with demo._Single(console) as single:
        for token in tokens(*pieces):
            single.show(token)
    text = "".join(pieces) + "\n"
    assert console.file.getvalue() == (visible(text) if shown else text)
    assert not shown or not set(console.file.getvalue()) & CONTROLS


def test_panels_and_tables_hold_text() -> None:
    batch = demo._Batch(Console(file=io.StringIO()), [NASTY, "second"])
    for token in tokens(*NASTY):
        batch.show(token)
    panels, table = printed(batch._render()), printed(terminal.table(NASTY, {NASTY: NASTY}))
    for out, times in ((panels, 2), (table, 3)):
        assert out.count(visible(NASTY)) == times and not set(out) & CONTROLS


@pytest.mark.parametrize("error", [RequestError(NASTY, got=NASTY), OSError(NASTY), FileNotFoundError(2, NASTY, NASTY)])
def test_errors_are_text(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    app = typer.Typer()

    @app.command()
    def fail() -> None:
        raise error

    assert terminal.run(app, [], "prog") == 2
    seen = capsys.readouterr().err
    assert "[bold]a[/red]" in seen and r"\x1b]0;" in seen and not set(seen) & CONTROLS


@pytest.mark.parametrize(
    "args", [[f"--{NASTY}"], [NASTY], ["--temperature", NASTY], ["--model", NASTY, "--prompt", "x"]]
)
def test_mistakes_of_the_command_line_are_one_line(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(args) == 2
    seen = capsys.readouterr().err
    assert seen.startswith("ttnn-moe: ") and len(seen.splitlines()) == 1 and not set(seen) & CONTROLS


def test_a_file_gets_the_exact_text(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """Random weights choose bytes at random, controls too."""
    monkeypatch.setenv("TTNN_MOE_BACKEND", "reference")
    directory = build(make(tmp_path / "[red]\x1b[31mmodel", vocab_size=403))
    tokenizer = Tokenizer.from_directory(directory)
    ids = tokenizer.encode("hello")
    options = {"max_new_tokens": 60, "temperature": 1.0, "seed": 3}
    expected = generate(load_model(directory), [ids], tokenizer=tokenizer, stop_ids=(), **options).texts[0]
    assert set(expected) & CONTROLS
    args = "--no-chat --max-new-tokens 60 --temperature 1 --seed 3 --prompt hello".split()
    capsys.readouterr()
    assert demo.main(["--model", str(directory), *args]) == 0
    captured = capsys.readouterr()
    assert captured.out == expected + "\n" and "new tokens" in captured.err and not set(captured.err) & CONTROLS
