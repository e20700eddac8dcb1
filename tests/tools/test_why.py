"""What runs a problem and why nothing else does, in words: ttnn_moe.why and `ttnn-moe why`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from typer.testing import CliRunner

import ttnn_moe
from ttnn_moe import BackendUnavailable, Problem, registry
from ttnn_moe.backend import Probe
from ttnn_moe.cli import app
from ttnn_moe.cuda import backend as cuda
from ttnn_moe.cuda import run
from ttnn_moe.errors import ContractError

SIZES = {"T": 100, "E": 128, "K": 8, "H": 2048, "I": 768, "device": "cuda"}


def _problem(**change: object) -> Problem:
    return Problem(**(SIZES | change))  # type: ignore[arg-type]


@pytest.fixture(params=[(9, 0)])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU of some compute capability, as far as choosing goes."""
    monkeypatch.setattr(cuda.CudaBackend, "probe", classmethod(lambda cls: Probe(True, devices=("a GPU",))))
    monkeypatch.setattr(cuda, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(run, "capability", lambda device: request.param)
    monkeypatch.setattr(run, "no_compiler", lambda: None)
    registry.look_again()
    yield
    monkeypatch.undo()
    registry.look_again()


@pytest.mark.parametrize(
    ("gpu", "change", "words"),
    [
        ((9, 0), {}, "CUDA C++ kernels for sm_90a"),
        ((8, 0), {}, "CUDA C++ kernels for sm_80"),
        ((12, 1), {"dtype": torch.float16}, "CUDA C++ kernels for sm_120f"),
        (
            (10, 0),
            {},
            "Triton kernels, since the CUDA C++ kernels do not serve: compute capability 8.x, 9.0 and 12.x, not 10.0",
        ),
        (
            (9, 0),
            {"H": 2080},
            "Triton kernels, since the CUDA C++ kernels do not serve: multiples of 64, not 2080 and 768",
        ),
        ((8, 6), {"dtype": torch.float32}, "Triton kernels, since the CUDA C++ kernels do not serve: bf16 and fp16"),
        ((8, 9), {"E": 1024}, "Triton kernels, since the CUDA C++ kernels do not serve: sm_89 has: 99 KiB"),
        ((9, 0), {"T": 0}, "CUDA C++ kernels for sm_90a"),
    ],
    indirect=["gpu"],
)
def test_the_kernels_of_a_gpu_are_named(gpu: None, change: dict[str, object], words: str) -> None:
    first, *others = str(ttnn_moe.why(_problem(**change))).splitlines()
    kernels, _, reason = words.partition(": ")
    assert first.startswith(f"cuda runs it, with {kernels}") and reason in first
    assert reason or first.endswith(kernels)
    assert [line.split()[0] for line in others] == [name for name in registry.backends() if name != "cuda"]
    assert all(" does not: " in line for line in others)


def test_what_stands_in_for_an_older_gpu_is_named(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTNN_MOE_CUDA_ARCH", "sm_80")
    assert "CUDA C++ kernels for compute_80" in str(ttnn_moe.why(_problem()))
    monkeypatch.setenv("TTNN_MOE_CUDA_ARCH", "sm_61")
    with pytest.raises(ContractError, match="TTNN_MOE_CUDA_ARCH"):
        ttnn_moe.why(_problem())


def test_a_missing_compiler_is_named(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "no_compiler", lambda: "cuda.core is not installed")
    assert "Triton kernels, since the CUDA C++ kernels do not serve: cuda.core is not" in str(ttnn_moe.why(_problem()))


def test_a_backend_that_was_named_and_those_that_could() -> None:
    problem = Problem(4, 8, 2, 64, 64, torch.float32)
    assert str(ttnn_moe.why(problem, "reference")).startswith("reference runs it\n")
    with pytest.raises(BackendUnavailable, match="no such backend"):
        ttnn_moe.why(problem, "nonesuch")


def test_backends_that_could_run_it_too_are_listed(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.CudaBackend, "why_not", lambda self, problem: None)
    assert "reference could, if asked for" in str(ttnn_moe.why(_problem(device="cpu"), "cuda"))


def _table(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[str]:
    monkeypatch.setenv("COLUMNS", "300")
    done = CliRunner().invoke(app, ["why", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return [line.rstrip() for line in done.output.splitlines() if line.strip()]


def test_the_command_puts_equal_answers_together(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    title, columns, first, *others = _table(monkeypatch, "--tokens", "1,64,4096", "--hidden", "2080")
    assert title == "MoE layer, T=1 T=64 T=4096" and columns.split() == "backend runs it with, or why not".split()
    assert first.split()[:2] == ["cuda", "yes"] and "Triton kernels, since" in first and "2080" in first
    assert [line.split()[:2] for line in others] == [[name, "no"] for name in registry.backends() if name != "cuda"]


def test_without_a_gpu_the_command_says_why_each_backend_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    if registry.probe("cuda").available:
        pytest.skip("a GPU is here")
    title, _, *rows = _table(monkeypatch, "--tokens", "1,512")
    assert title == "MoE layer, T=1 T=512: nothing runs it here"
    assert [row.split()[:2] for row in rows] == [[name, "no"] for name in registry.backends()]
    assert registry.probe("cuda").reason in rows[0] and "to fix it: move them with .cpu()" in rows[-1]
    assert not any("{" in row for row in rows)
    rows = _table(monkeypatch, "--tokens", "1,512", "--device", "cpu")[2:]
    assert rows[0].split() == ["reference", "yes"]


def test_rows_say_the_same_as_the_lines() -> None:
    why = ttnn_moe.why(Problem(4, 8, 2, 64, 64, torch.float32), "reference")
    assert why.chosen == "reference" and why.rows[0] == registry.Row("reference", "runs")
    assert [row.backend for row in why.rows] == ["reference", *(b for b in registry.backends() if b != "reference")]
    assert str(why).splitlines() == [str(row) for row in why.rows]
    nothing = ttnn_moe.why(Problem(4, 8, 2, 64, 64, torch.float32, device="xpu"))
    assert nothing.chosen is None and {row.verdict for row in nothing.rows} == {"cannot"}


def test_the_command_refuses_what_is_no_number() -> None:
    with pytest.raises(ContractError, match="numbers like"):
        CliRunner().invoke(app, ["why", "--tokens", "many"], catch_exceptions=False)
