"""The demo and the benchmark as programs: what they print, and what they say to bad input."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from processes import run_python
from qwen3_checkpoints import HAS_TINY, make
from qwen3_tokenizers import build
from ttnn_moe.models.qwen3 import bench, demo


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a GPU is, which "auto" would choose; tests/support/qwen3_*_cases.py run there."""
    monkeypatch.setenv("TTNN_MOE_BACKEND", "reference")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = make(tmp_path / "model", vocab_size=403)
    return build(directory)


def truncate(directory: Path) -> None:
    os.truncate(directory / "model.safetensors", 4000)


def retype(directory: Path) -> None:
    path = directory / "config.json"
    path.write_text(path.read_text().replace("qwen3_moe", "llama"))


def shrink_vocabulary(directory: Path) -> None:
    make(directory, vocab_size=60)


BAD: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    "not a checkpoint": (lambda d: (d / "config.json").unlink(), [], "no config.json"),
    "truncated weights": (truncate, [], "not a whole safetensors file"),
    "another architecture": (retype, [], "another architecture"),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), [], "no tokenizer.json"),
    "prompt over the context": (lambda d: None, ["--prompt", "x1y2" * 200], "too long for the context"),
    "ids out of range": (shrink_vocabulary, [], "id out of range"),
    "absent backend": (lambda d: None, ["--backend", "nonesuch"], "nonesuch"),
    "no prompt": (lambda d: None, ["--prompt"], "--prompt"),
    "bad temperature": (lambda d: None, ["--temperature", "-1"], "temperature"),
    "bad dtype": (lambda d: None, ["--dtype", "int4"], "int4"),
    "absent device": (lambda d: None, ["--device", "nonesuch"], "no device nonesuch"),
    "a device of another backend": (lambda d: None, ["--device", "emulator"], "with --backend tenstorrent"),
    "bad seed": (lambda d: None, ["--seed", "-1"], "leave --seed out"),
    "a seed that changes nothing": (
        lambda d: None,
        ["--seed", "1", "--top-k", "3"],
        "without a --temperature above 0, --top-k and --seed would change nothing",
    ),
    "top-p that changes nothing": (lambda d: None, ["--top-p", "0.5", "--temperature", "0"], "or leave --top-p out"),
    "no new tokens": (
        lambda d: None,
        ["--max-new-tokens", "0"],
        "--max-new-tokens is out of range; got --max-new-tokens=0; expected an integer, 1 .. 2^63 - 1; "
        "to fix it: give --max-new-tokens as an int",
    ),
    "bits of bf16": (
        lambda d: None,
        ["--kv-bits", "3"],
        "the paged KV cache has no choice of bits; got --kv-bits=3.0; expected --kv='bucketed' with bits; "
        "to fix it: give --kv='bucketed' as well, or leave --kv-bits out.",
    ),
    "unknown cache": (lambda d: None, ["--kv", "int4"], "no such KV-cache format; got --kv='int4'; "),
    "unknown option": (lambda d: None, ["--nonesuch"], "--nonesuch"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_input_is_one_message_and_code_2(name: str, directory: Path, capsys) -> None:
    damage, args, words = BAD[name]
    damage(directory)
    assert demo.main(["--model", str(directory), "--prompt", "hello", *args]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == "" and "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--device", "meta"], "the device holds no values; got meta"), (["--batch", "70000"], "--batch")],
)
def test_what_cannot_be_timed_is_refused_before_weights_are_made(
    options: list[str], words: str, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "randomize", lambda *args: pytest.fail("weights are made"))
    assert bench.main(["--config", str(directory), "--random-weights", *options]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("bits", ["2", "2.001", "17", "nan"])
def test_bits_are_checked_before_the_weights_are_read(
    bits: str, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "load_model", lambda *args: pytest.fail("the weights are read"))
    args = ["--model", str(directory), "--prompt", "hello", "--kv", "bucketed", "--kv-bits", bits]
    assert demo.main(args) == 2
    assert f"got --kv-bits={bits}" in (told := capsys.readouterr().err) and "kv_bits" not in told
    monkeypatch.setattr(bench, "load_model", lambda *args: pytest.fail("the weights are read"))
    assert bench.main(["--config", str(directory), *args[4:], "--backend", "reference"]) == 2
    assert f"got --kv-bits={bits}" in (told := capsys.readouterr().err) and "kv_bits" not in told


def test_exit_code_and_message_of_the_process(tmp_path: Path) -> None:
    done = run_python("-m", "ttnn_moe.models.qwen3.demo", "--model", tmp_path, "--prompt", "hi", code=2, COLUMNS="200")
    assert done.stdout == ""
    assert done.stderr.startswith("ttnn-moe: ") and len(done.stderr.splitlines()) == 1


def test_one_prompt_prints_its_text_and_on_stderr_the_table(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    args = ["--model", str(directory), *"--prompt hello --max-new-tokens 9 --temperature 1 --seed 4".split()]
    ran = []
    for more in (["--backend", "reference"], []):
        assert demo.main([*args, *more]) == 0
        ran.append(capsys.readouterr())
    stages = ("load", "compile and warm up", "time to first token")
    for words in (*stages, "tokens/s/user", "tokens/s", "reference on cpu"):
        assert words in ran[0].err and words not in ran[0].out
    assert ran[0].out.strip() and ran[0].out == ran[1].out


def test_a_terminal_gets_text_and_table(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert demo.main(["--model", str(directory), "--prompt", "hello", "--max-new-tokens", "2"]) == 0
    assert "tokens/s" in capsys.readouterr().out


def test_a_file_gets_the_text_alone_where_colours_are_forced(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Continuous integration often forces them."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.setenv(name, "1")
    assert demo.main(["--model", str(directory), "--prompt", "hello", "--max-new-tokens", "2"]) == 0
    said = capsys.readouterr()
    assert "tokens/s" in said.err and "tokens/s" not in said.out and "\x1b" not in said.out + said.err


def test_a_batch_prints_every_answer_and_markup_is_text(directory: Path, capsys) -> None:
    tokens = ["[bold]no markup[/bold]", "second", "third"]
    args = ["--no-chat", "--max-new-tokens", "5"]
    assert demo.main(["--model", str(directory), *args, *(x for t in tokens for x in ("--prompt", t))]) == 0
    out = capsys.readouterr().out
    for text in tokens:
        assert text in out


def stdin(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.mark.parametrize("text", ["hello", "two\nlines\n", "-"], ids=["line", "lines", "dash"])
def test_a_prompt_may_come_from_standard_input(text: str, directory: Path, monkeypatch, capsys) -> None:
    """The whole text is one prompt; its last newline is not in it."""
    args = ["--model", str(directory), "--max-new-tokens", "2"]
    asked: list[str] = []
    encode = demo._encode
    monkeypatch.setattr(demo, "_encode", lambda _, text, chat: asked.append(text) or encode(_, text, chat))
    stdin(f"{text}\n".encode(), monkeypatch)
    assert demo.main([*args, "--prompt", "first", "--prompt", "-"]) == 0
    assert asked == ["first", text]


@pytest.mark.parametrize(
    ("data", "args", "words"),
    [
        (b"\xff", [], "not UTF-8"),
        (b"", [], "got nothing"),
        (b"x", ["--prompt", "-"], "got --prompt - twice"),
        (b"x", ["--parallel", "experts"], "got --prompt - and --parallel"),
    ],
)
def test_standard_input_that_is_no_prompt(
    data: bytes, args: list[str], words: str, directory, monkeypatch, capsys
) -> None:
    stdin(data, monkeypatch)
    assert demo.main(["--model", str(directory), "--prompt", "-", *args]) == 2
    assert words in capsys.readouterr().err


def test_help_says_what_runs_without_a_prompt(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert demo.main(["-h"]) == 0
    assert "with the bundled checkpoint: an example of each of its tasks" in capsys.readouterr().out


def test_chat_needs_a_template(directory: Path, capsys) -> None:
    (directory / "chat_template.jinja").unlink()
    args = ["--model", str(directory), "--prompt", "hi", "--max-new-tokens", "2"]
    assert demo.main(args) == 2 and "--no-chat" in capsys.readouterr().err
    assert demo.main([*args, "--no-chat"]) == 0


def test_no_prompt_is_only_for_the_bundled_checkpoint(directory: Path, capsys) -> None:
    assert demo.main(["--model", str(directory)]) == 2
    assert "--prompt" in capsys.readouterr().err


@pytest.mark.skipif(not HAS_TINY, reason="the bundled checkpoint is not built")
def test_the_bundled_checkpoint_answers_by_default(capsys) -> None:
    assert demo.main(["--max-new-tokens", "40"]) == 0
    said = capsys.readouterr()
    assert "Copy:" in said.out and "tokens/s/user" in said.err


def test_bench_of_a_size_without_weights(tmp_path: Path, directory: Path, capsys) -> None:
    file = tmp_path / "figures.json"
    args = ["--config", str(directory), "--layers", "2", "--batch", "2", "--prompt-len", "8", "--new-tokens", "4"]
    assert bench.main([*args, "--random-weights", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert (figures["layers"], figures["batch"], figures["backend"]) == (2, 2, "reference")
    for name in ("load_s", "warm_up_s", "time_to_first_token_s", "tokens_per_s_user", "tokens_per_s"):
        assert figures[name] > 0
    assert bench.main([*args[:-1], "1", "--random-weights", "--json", str(file)]) == 0
    assert json.loads(file.read_text())["tokens_per_s"] is None, "no step was timed"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["figures.json"]
    assert "time to first token" in capsys.readouterr().out


@pytest.mark.parametrize("kv", ["paged", "bucketed"])
def test_bench_gives_the_cache_the_memory_that_it_reports(
    kv: str, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever an engine takes by default: on a CPU 4 GiB."""
    for place in ("kv.paged", "kv.bucketed.cache"):
        monkeypatch.setattr(f"ttnn_moe.{place}.default_memory", lambda device: 100_000)
    ran, warmed_up = [], bench.terminal.warmed_up

    def kept(*args: object) -> object:
        ran.append(warmed_up(*args))  # type: ignore[arg-type]
        return ran[-1]

    monkeypatch.setattr(bench.terminal, "warmed_up", kept)
    args = ["--config", str(directory), "--kv", kv, "--batch", "9", "--prompt-len", "8", "--new-tokens", "4"]
    args += ["--kv-bits", "8"] if kv == "bucketed" else []
    assert bench.main([*args, "--random-weights"]) == 0
    assert ran[0][0].fits(12) == 9
    monkeypatch.setattr(bench.terminal, "warmed_up", lambda *args: warmed_up(*args[:-1], 100_000))
    assert bench.main([*args, "--random-weights"]) == 2
    words = {"paged": "got 9 sequences of 12 tokens; expected at most 1", "bucketed": "holds no page"}
    assert words[kv] in capsys.readouterr().err


BAD_BENCH = {
    "preset without weights": (["--config", "qwen3-30b-a3b"], "--random-weights"),
    "unknown": (["--config", "qwen9", "--random-weights"], "qwen3-30b-a3b"),
    "layers": (["--config", "qwen3-30b-a3b", "--random-weights", "--layers", "49"], "1 .. 48"),
    "memory": (["--config", "qwen3-30b-a3b", "--random-weights", "--batch", "60000"], "GiB (weights 56.9, KV cache"),
    "batch": (["--config", "qwen3-30b-a3b", "--random-weights", "--layers", "1", "--batch", "0"], "expected 1 or more"),
    "context": (
        ["--config", "qwen3-30b-a3b", "--random-weights", "--layers", "1", "--prompt-len", "40960"],
        "too long for the context",
    ),
    "backend": (["--config", "qwen3-30b-a3b", "--random-weights", "--backend", "nonesuch"], "nonesuch"),
    "nowhere to write": (
        ["--config", "qwen3-30b-a3b", "--random-weights", "--json", "/nonesuch/x.json"],
        "/nonesuch/x.json cannot be written; got no folder /nonesuch; ",
    ),
    "a folder to write": (["--config", "qwen3-30b-a3b", "--random-weights", "--json", "/tmp"], "got Is a directory"),
}


@pytest.mark.parametrize("name", list(BAD_BENCH))
def test_bench_refuses(name: str, capsys) -> None:
    args, words = BAD_BENCH[name]
    assert bench.main(args) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.out == ""
