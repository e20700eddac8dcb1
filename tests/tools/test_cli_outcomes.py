"""What the command answers to trouble: one line, no traceback, an exit code."""

from __future__ import annotations

import io
import json
import random
import sys
from pathlib import Path

import pytest
from torch import OutOfMemoryError

from command import run
from paths import ROOT, TINY
from processes import run_python
from ttnn_moe import caches, doctor
from ttnn_moe import command_line as gate
from ttnn_moe.cache_folder import CacheFolder

SMALL = ["--experts", "8", "--topk", "2", "--hidden", "64", "--intermediate", "64"]
# a command that works, and options to give it
COMMANDS: dict[str, tuple[list[str], str]] = {
    "doctor": (["--plan", "qwen3-30b-a3b"], "plan mesh chip weights batch sequence"),
    "selfcheck": ([], "backend dtype"),
    "bench": (
        ["--tokens", "1", *SMALL, "--rounds", "1"],
        "tokens experts topk hidden dtype backend device rounds seed format activation",
    ),
    "warmup": (["--tokens", "1", *SMALL], "tokens experts topk hidden intermediate dtype arch"),
    "why": (
        ["--tokens", "1", *SMALL, "--device", "cpu", "--operators"],
        "tokens experts topk hidden intermediate dtype backend device heads kv-heads head-dim",
    ),
    "generate": (
        ["--prompt", "a", "--max-new-tokens", "1"],
        "model backend device dtype max-new-tokens temperature top-k",
    ),
    "bench-model": (
        ["--config", str(TINY), "--prompt-len", "2", "--new-tokens", "1"],
        "config layers batch prompt-len new-tokens backend device dtype seed",
    ),
    "profile": (
        ["--model", str(TINY), "--prompt-len", "2", "--steps", "1"],
        "model batch prompt-len steps backend device dtype",
    ),
    # --out holds other files: refused after all options
    "quantize": (["--model", str(TINY), "--out", str(ROOT / "tests")], "model format calibrate tokens device"),
}
WRONG = [
    *(
        "-1",
        "²",
        "٣x",
        "1e400",
        "nan",
        "9" * 30,
        "9" * 5000,
        str(-(2**63) - 1),
        "[/red]",
        "[bold]no",
        "\udcff",
        "\x1b[31m",
    ),
    *("a" * 5000, "1,,2", "/dev/null", "/etc/passwd", "~nobody", "%s{}", "1.5.5", "8by1", "cuda:99", "no\nsuch", "😀"),
]


def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = run(monkeypatch, *args)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err and "a mistake in this package" not in captured.err, captured.err
    return code, captured.out, captured.err


@pytest.mark.parametrize(("command", "option"), [(c, o) for c, (_, names) in COMMANDS.items() for o in names.split()])
def test_a_wrong_value_is_one_line_and_code_2(command: str, option: str, monkeypatch, capsys) -> None:
    """Any value of the table that an option takes all the same, such as another seed, must then work."""
    values = random.Random(f"{command} {option}").sample(WRONG, 8)
    for value in values:
        code, out, err = shown(monkeypatch, capsys, command, *COMMANDS[command][0], f"--{option}", value)
        if code == 0:
            assert option in ("seed", "tokens", "temperature", "top-k", "device", "backend"), (value, out)
            continue
        first, *details = err.removesuffix("\n").split("\n")
        assert code == 2 and first.startswith("ttnn-moe: ") and len(first) < 1200, (value, err)
        assert all(line.startswith("  ") for line in details) and "\x1b" not in err, (value, err)


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["why", "--tokens", "²"], "numbers like"),
        (["generate", "--prompt", "caf\udce9"], r"not UTF-8 text; got 'caf\udce9'"),
        (["generate", "--prompt=\udcff"], "not UTF-8 text"),
        (["generate", "--model", "/no\udcffthing", "--prompt", "x"], r"/no\udcffthing"),
        (["bench-model", "--config", "[/red]", "--random-weights"], "[/red]"),
        (["doctor", "--plan", "[/red]"], "[/red]"),
        (["generate", "--nonesuch"], "see ttnn-moe generate --help"),
        (["why", "--tokens"], "requires an argument; to fix it: see ttnn-moe"),
        (["why", "--heads", "3"], "without --operators, --heads would change nothing"),
        (["bench", "--tokens", "1", "--tune", "--json", "--backend", "triton"], "got --json and --backend triton"),
        (["doctor", "--mesh", "1x8", "--kv=bfloat8_b"], "got --mesh and --kv; to fix it: give --plan, or leave"),
        (["quantize", "--model", str(TINY), "--out", "x", "--tokens", "5"], "give --calibrate, or leave --tokens out"),
        (["generate", "--device", "emulator", "--prompt", "x"], "with --backend tenstorrent; or leave device and"),
        (["\x1b[31m"], r"\x1b[31m"),
    ],
)
def test_bad_input_is_told_in_one_line(args: list[str], word: str, monkeypatch, capsys) -> None:
    code, out, err = shown(monkeypatch, capsys, *args)
    assert (code, out, err.count("\n")) == (2, "", 1) and word in err and err.startswith("ttnn-moe: ")


def test_markup_in_the_name_of_a_checkpoint_is_text(tmp_path: Path, monkeypatch, capsys) -> None:
    """And the figures are in the file."""
    (tmp_path / "[").mkdir()
    model = tmp_path / "[" / "red] [bold]"  # seen whole, it closes a style that nothing opened
    model.symlink_to(TINY)
    options = ["--prompt-len", "2", "--new-tokens", "1", "--json", str(tmp_path / "figures.json")]
    code, out, _ = shown(monkeypatch, capsys, "bench-model", "--config", str(model), *options)
    assert code == 0 and json.loads((tmp_path / "figures.json").read_text())["config"] == str(model)
    assert "[bold]" in "".join(out.split())


def test_figures_are_in_the_file_though_they_cannot_be_printed(tmp_path: Path, monkeypatch, capsys) -> None:
    path = tmp_path / "figures.json"
    options = ["--config", str(TINY), "--prompt-len", "2", "--new-tokens", "1", "--json", str(path)]
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run(monkeypatch, "bench-model", *options) == 1
    assert json.loads(path.read_text())["batch"] == 1
    assert capsys.readouterr().err == "ttnn-moe: the output cannot be written: No space left on device\n"


def test_figures_are_printed_though_the_file_cannot_be_written(tmp_path: Path, monkeypatch, capsys) -> None:
    options = ["--config", str(TINY), "--prompt-len", "2", "--new-tokens", "1", "--json", "/dev/full"]
    code, out, err = shown(monkeypatch, capsys, "bench-model", *options)
    assert code == 1 and "tokens" in out and "No space left on device" in err


@pytest.mark.parametrize("command", [["doctor"], ["doctor", "--json"], ["why"], ["cache"], ["--help"], ["--version"]])
def test_a_full_disk_under_the_output(command: list[str], monkeypatch, capsys) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: {"environment": {}}) if "--json" in command else None
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run(monkeypatch, *command) == 1
    assert capsys.readouterr().err == "ttnn-moe: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("command", [["doctor"], ["why"], ["generate", "--prompt", "é日本", "--max-new-tokens", "2"]])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_output_that_lacks_characters(command: list[str], encoding: str, monkeypatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", out)
    assert run(monkeypatch, *command) == 0
    assert out.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]


def test_a_closed_output(monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert run(monkeypatch, "why", "--tokens", "1") == 0
    assert run(monkeypatch, "why", "--tokens", "x") == 2


def raising(error: BaseException) -> int:
    def command() -> int:
        raise error

    return gate.guarded(command)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (BrokenPipeError(), 1, ""),
        (SystemExit(3), 3, ""),
        (SystemExit(None), 0, ""),
        (SystemExit("words"), 1, ""),
        (MemoryError(), 2, "out of memory"),
        (
            OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB"),
            2,
            "got CUDA out of memory. Tried to allocate 2",
        ),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
            2,
            "ttnn-moe: out of memory; got Default",
        ),
        (
            RuntimeError("NPU out of memory. Tried to allocate"),
            2,
            "to fix it: free memory, ask for smaller sizes, or take",
        ),
        (FileNotFoundError(2, "No such file", "/a"), 2, "[Errno 2] No such file: '/a'"),
        (KeyError("x"), 1, "a mistake in this package at test_cli_outcomes.py"),
        (RuntimeError("two\nlines"), 1, "RuntimeError: two lines"),
    ],
    ids=repr,
)
def test_every_exception_is_one_line_and_a_code(error: BaseException, code: int, said: str, capsys) -> None:
    assert raising(error) == code
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == bool(said) and "Traceback" not in err


def test_verbose_shows_where_a_mistake_is(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["ttnn-moe", "--verbose"])
    assert raising(KeyError("x")) == 1
    assert "Traceback" in capsys.readouterr().err


TORCH = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)
except KeyboardInterrupt as error:
    {answer}
"""


@pytest.mark.parametrize("entry", [["-m", "ttnn_moe"], ["-c", "from ttnn_moe.__main__ import main; main()"]])
@pytest.mark.parametrize("answer", ["raise", "raise ImportError('numpy failed') from error", "print('went on')"])
def test_ctrl_c_during_imports(entry: list[str], answer: str, tmp_path: Path) -> None:
    """A torch that is slow to import stands in for torch."""
    (tmp_path / "torch.py").write_text(TORCH.format(answer=answer))
    # a shell starts what it puts into the background without SIGINT
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = ['ttnn-moe', 'doctor']; "
    start = "import runpy; runpy.run_module('ttnn_moe', run_name='__main__')" if entry[0] == "-m" else entry[1]
    done = run_python("-c", code + start, code=130, timeout=60)
    assert (done.stdout, done.stderr) == ("", "ttnn-moe: interrupted\n")


def test_nothing_slow_is_imported_before_the_gate() -> None:
    code = "import sys, ttnn_moe.__main__; print({'torch', 'numpy', 'typer', 'rich'}.intersection(sys.modules))"
    assert run_python("-c", code).stdout == "set()\n"


def test_cache_counts_what_killed_writers_left(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("TTNN_MOE_CACHE_DIR", str(tmp_path))
    folder = CacheFolder(tmp_path / "kernels")
    folder.keep("one.bin", lambda part: part.write_bytes(b"1"))
    killed = "import os, sys, pathlib; from ttnn_moe.whole_file import whole_file\n"
    killed += "with whole_file(pathlib.Path(sys.argv[1])) as part: part.write_text('half'); os.kill(os.getpid(), 9)"
    assert run_python("-c", killed, str(folder.where / "two.bin"), code=-9)
    code, out, _ = shown(monkeypatch, capsys, "cache")
    assert code == 0 and f"{folder.where}: 1 kernels" in out and "1 unfinished files of killed writers" in out
    assert shown(monkeypatch, capsys, "cache", "--clear")[1].startswith("removed 1 kernels")
    assert not list(folder.where.iterdir())
    folder.where.chmod(0o777)
    code, _, err = shown(monkeypatch, capsys, "cache")
    assert code == 2 and "mode 777" in err and "chmod 700" in err


def test_cache_says_that_its_folder_is_a_file(tmp_path: Path, monkeypatch, capsys) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("TTNN_MOE_CACHE_DIR", str(file))
    code, _, err = shown(monkeypatch, capsys, "cache")
    assert code == 2 and err.count(f"{file}, which is no folder; to fix it: set TTNN_MOE_CACHE_DIR to a folder") == 1
    monkeypatch.setenv("TTNN_MOE_CACHE_DIR", str(tmp_path / "not" / "made yet"))
    assert shown(monkeypatch, capsys, "cache")[0] == 0


def test_cache_says_where_its_folders_cannot_be_made(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("TTNN_MOE_CACHE_DIR", str(tmp_path / "none"))
    monkeypatch.setattr(caches.os, "access", lambda path, mode: path != tmp_path)  # root may write everywhere
    code, out, err = shown(monkeypatch, capsys, "cache")
    assert code == 2 and "0 kernels" in out
    assert err.count(f"got {tmp_path}, in which this user cannot make folders; to fix it: set TTNN_MOE_CACHE_DIR") == 1
    for name in ("kernels", "tiles", "emulator", "tenstorrent"):  # read-only folders serve what they hold
        (tmp_path / "none" / name).mkdir(parents=True, mode=0o700)
    assert shown(monkeypatch, capsys, "cache")[0] == 0
