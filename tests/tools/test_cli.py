"""The ttnn-moe command: doctor, generate, logging, and what it says to bad input."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from command import run
from paths import ROOT
from processes import run_python
from ttnn_moe import cli, doctor, registry
from ttnn_moe.arguments import names_of
from ttnn_moe.backend import Probe
from ttnn_moe.cuda.jit import build
from ttnn_moe.errors import BackendUnavailable, ContractError
from ttnn_moe.models.qwen3.weights import dtype_of
from ttnn_moe.packages import install


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, with the default settings but for `environment`."""
    return run_python("-c", code, without=("TTNN_MOE_", "LOGURU_"), **environment)


@pytest.fixture
def one_absent_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Probe(False, reason="no [blue] device", remedy="pip install 'ttnn-moe[blue]'")
    here, probe = registry.backends(), registry.probe
    monkeypatch.setattr(registry, "backends", lambda: [*here, "blue"])
    monkeypatch.setattr(registry, "probe", lambda name: absent if name == "blue" else probe(name))


def test_doctor_says_why_a_backend_is_absent(monkeypatch, capsys, one_absent_backend) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert run(monkeypatch, "doctor") == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in lines if line.strip()}
    assert rows["reference"].split()[1] == "yes"
    assert rows["blue"].split()[1] == "no"
    # brackets in a message are text to rich too
    assert "no [blue] device" in rows["blue"] and "pip install 'ttnn-moe[blue]'" in rows["blue"]


@pytest.mark.parametrize("words", [["doctor"], ["doctor", "--plan", "qwen3-30b-a3b"], ["why"]], ids=" ".join)
def test_a_pipe_gets_no_colours_where_they_are_forced(monkeypatch, capsys, words: list[str]) -> None:
    """Continuous integration often forces them."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    run(monkeypatch, *words)
    out = capsys.readouterr().out
    assert len(out.splitlines()) > 3 and "\x1b" not in out


def test_doctor_json_is_what_the_probes_say(monkeypatch, capsys, one_absent_backend) -> None:
    monkeypatch.setenv("TTNN_MOE_SPECIAL", "1")
    monkeypatch.setenv("SOME_SECRET", "hush")
    assert run(monkeypatch, "doctor", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["backends"]) == registry.backends()
    for name, backend in found["backends"].items():
        probe = registry.probe(name)
        assert backend == {
            "available": probe.available,
            "devices": list(probe.devices),
            "reason": probe.reason,
            "remedy": probe.remedy,
        }
    import torch

    assert found["packages"]["torch"] == torch.__version__
    assert found["environment"]["TTNN_MOE_SPECIAL"] == "1"
    assert "hush" not in json.dumps(found)


@pytest.mark.parametrize("columns", ["40", "80"])
def test_doctor_cuts_no_word(monkeypatch, capsys, columns: str) -> None:
    path = "/" + "folder/" * 20
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TTNN_MOE_CACHE_DIR", path)
    assert run(monkeypatch, "doctor") == 0
    out = capsys.readouterr().out
    assert "\u2026" not in out and path in "".join(out.split())


def test_doctor_lists_the_chips_of_the_native_planner(monkeypatch, capsys) -> None:
    planner = pytest.importorskip("ttnn_moe._planner", reason="native planner: not built")
    monkeypatch.setenv("COLUMNS", "160")
    assert run(monkeypatch, "doctor") == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.strip()}
    for chip in planner.chips():
        assert rows[chip.name][1:4] == [
            chip.arch,
            "x".join(map(str, chip.tensix_grid)),
            "x".join(map(str, chip.compute_grid)),
        ]


def test_doctor_without_the_native_planner_gives_the_remedy(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "ttnn_moe._planner", None)  # import raises ModuleNotFoundError
    monkeypatch.setenv("COLUMNS", "160")
    assert run(monkeypatch, "doctor") == 0
    out = capsys.readouterr().out
    assert "Native planner: not built" in out and doctor.PLANNER_REMEDY in out


@pytest.mark.parametrize("reason", [None, "cuda.core is not installed; to fix it: install it"])
def test_doctor_says_when_only_triton_kernels_run(reason: str | None, monkeypatch, capsys) -> None:
    monkeypatch.setattr(build, "why_not", lambda: reason)
    monkeypatch.setenv("COLUMNS", "160")
    assert run(monkeypatch, "doctor") == 0
    said = "CUDA C++ kernels: cuda.core is not installed\n  NVIDIA GPUs run only Triton kernels then: "
    out = capsys.readouterr().out
    assert (said in out) == (f"  to have them: {install('cuda')}\n" in out) == (reason is not None)


def test_nothing_installs_the_package_by_name_and_extras_exist() -> None:
    """No index has the package."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = {path: path.read_text() for path in [*pages, *(ROOT / "ttnn_moe").rglob("*.py")]}
    assert [path for path, text in texts.items() if "pip install 'ttnn-moe" in text] == []
    extras = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M))
    asked = {extra for text in texts.values() for extra in re.findall(r"'\.\[(\w+)\]'|\binstall\('(\w+)'\)", text)}
    assert {extra for pair in asked for extra in pair if extra} - extras == set()
    assert "pip install '.[cuda]'" in install("cuda")


def test_generate_takes_the_options_of_the_demo(monkeypatch, capsys) -> None:
    pytest.importorskip("ttnn_moe.models.qwen3.demo")
    monkeypatch.setenv("COLUMNS", "120")
    assert run(monkeypatch, "generate", "--help") == 0
    out = capsys.readouterr().out
    for option in ("--model", "--prompt", "--backend", "--temperature"):
        assert option in out


def test_bench_model_takes_the_options_of_the_models_benchmark(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert run(monkeypatch, "bench-model", "--help") == 0
    out = capsys.readouterr().out
    for option in ("--config", "--random-weights", "--layers", "--prompt-len", "--json"):
        assert option in out


@pytest.mark.parametrize("command", [None, *(command.callback.__name__ for command in cli.app.registered_commands)])
def test_every_command_has_h_for_help(command: str | None, monkeypatch, capsys) -> None:
    name = [] if command is None else [command.replace("_", "-")]
    assert run(monkeypatch, *name, "-h") == 0
    assert " ".join(["Usage: ttnn-moe", *name]) in capsys.readouterr().out


def test_the_package_runs_as_a_command() -> None:
    done = run_python("-m", "ttnn_moe", "--help")
    for command in ("doctor", "selfcheck", "bench", "bench-model", "why", "generate", "quantize", "profile"):
        assert f" {command} " in done.stdout


BAD = {
    "no such command": (["nonesuch"], "nonesuch"),
    "no such option": (["doctor", "--nonesuch"], "--nonesuch"),
    "generate: not a checkpoint": (["generate", "--model", "/nonesuch", "--prompt", "x"], "/nonesuch"),
    "bench-model: no such option": (["bench-model", "--nonesuch"], "--nonesuch"),
    "generate: no such option": (["generate", "--nonesuch"], "--nonesuch"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_message_and_code_2(name: str, monkeypatch, capsys) -> None:
    args, words = BAD[name]
    assert run(monkeypatch, *args) == 2
    captured = capsys.readouterr()
    assert words in captured.err and "Traceback" not in captured.err
    assert captured.out == ""


def test_an_error_of_ours_is_one_message_and_code_2(monkeypatch, capsys) -> None:
    def fail() -> None:
        raise BackendUnavailable("the moon is down", got="none", expected="one", remedy="wait")

    monkeypatch.setattr(doctor, "examine", fail)
    assert run(monkeypatch, "doctor") == 2
    assert capsys.readouterr().err == "ttnn-moe: the moon is down; got none; expected one; to fix it: wait.\n"


def test_version(monkeypatch, capsys) -> None:
    from importlib.metadata import PackageNotFoundError, version

    import ttnn_moe

    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.strip() == ttnn_moe.__version__
    try:
        assert version("ttnn-moe") == ttnn_moe.__version__
    except PackageNotFoundError:
        pass  # run from a checkout that is not installed


# Records as our modules make them, and one of the application's, beside loguru's default sink.
RECORDS = """
import ttnn_moe
from loguru import logger
def record(module, text):
    exec("logger.warning(text)", {"__name__": module, "logger": logger, "text": text})
record("ttnn_moe.registry", "ours" + chr(27) + " {x} <red>")
record("ttnn_moe.models.qwen3.weights", "the model's")
record("models.other", "another's")
record("app", "the application's")
"""


def test_the_library_is_silent_unless_asked() -> None:
    done = python(RECORDS)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 2 and "another's" in lines[0] and "the application's" in lines[1]


@pytest.mark.parametrize("level, ours", [("debug", 1), ("ERROR", 0)])
def test_ttnn_moe_log_prints_each_record_once(level: str, ours: int) -> None:
    done = python(RECORDS, TTNN_MOE_LOG=level)
    assert done.stderr.count(r": ours\x1b {x} <red>") == done.stderr.count(": the model's") == ours
    assert done.stderr.count("another's") == done.stderr.count("the application's") == 1


@pytest.mark.parametrize("call", [["-c", "import ttnn_moe"], ["-W", "error", "-m", "ttnn_moe", "--version"]])
def test_a_wrong_log_level_is_one_line(call: list[str]) -> None:
    done = run_python(*call, without=("TTNN_MOE_", "LOGURU_"), TTNN_MOE_LOG="loud")
    assert done.returncode == 0
    assert re.fullmatch(
        "ttnn-moe: warning: TTNN_MOE_LOG is ignored; got 'loud'; expected one of trace, debug, .*, critical; "
        "to fix it: correct or unset TTNN_MOE_LOG.\n",
        done.stderr,
    )


def test_a_log_on_a_closed_stderr_does_not_keep_anyone_from_importing() -> None:
    """Python makes a stream None that is closed when it starts."""
    for level in ("debug", "loud"):
        done = python("import sys; sys.stderr = None; import ttnn_moe; print('here')", TTNN_MOE_LOG=level)
        assert done.stdout == "here\n"


def test_verbose_logs_to_stderr() -> None:
    code = """
import sys
from ttnn_moe import __main__ as command, doctor
from loguru import logger
def examine():
    exec("logger.debug('looked')", {"__name__": "ttnn_moe.doctor", "logger": logger})
    return {}
doctor.examine = examine
sys.argv = ["ttnn-moe", *sys.argv[1:], "--verbose", "doctor", "--json"]
command.main()
"""
    done = python(code)
    assert done.stdout == "{}\n" and done.stderr.count("looked") == 1


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "fp16", "float16", "fp32", "float32"])
def test_a_dtype_has_two_names(name: str) -> None:
    """One for every command, and for load_model."""
    found = cli._dtype(name)
    assert found == dtype_of(name) and str(found)[6:] in names_of(found) and name in names_of(found)


def test_a_dtype_that_a_command_does_not_take() -> None:
    with pytest.raises(ContractError, match=r"expected bfloat16 \(or bf16\), float16 \(or fp16\)"):
        cli._dtype("fp32", "bfloat16", "float16")
