"""What runs a problem and why nothing else does, in words: ttnn_moe.why and `ttnn-moe why`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from typer.testing import CliRunner

import ttnn_moe
from cuda_gpus import gpu_of, pretend
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
    pretend(monkeypatch, gpu_of(request.param))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
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
    first, *others = ttnn_moe.why(_problem(**change)).splitlines()
    kernels, _, reason = words.partition(": ")
    assert first.startswith(f"cuda runs it, with {kernels}") and reason in first
    assert reason or first.endswith(kernels)
    assert [line.split()[0] for line in others] == [name for name in registry.backends() if name != "cuda"]
    assert all(" does not: " in line for line in others)


def test_what_stands_in_for_an_older_gpu_is_named(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTNN_MOE_CUDA_ARCH", "sm_80")
    assert "CUDA C++ kernels for compute_80" in ttnn_moe.why(_problem())
    monkeypatch.setenv("TTNN_MOE_CUDA_ARCH", "sm_61")
    with pytest.raises(ContractError, match="TTNN_MOE_CUDA_ARCH"):
        ttnn_moe.why(_problem())


def test_a_missing_compiler_is_named(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "no_compiler", lambda: "cuda.core is not installed")
    assert "Triton kernels, since the CUDA C++ kernels do not serve: cuda.core is not" in ttnn_moe.why(_problem())


def test_a_backend_that_was_named_and_those_that_could() -> None:
    problem = Problem(4, 8, 2, 64, 64, torch.float32)
    assert ttnn_moe.why(problem, "reference").startswith("reference runs it\n")
    with pytest.raises(BackendUnavailable, match="no such backend"):
        ttnn_moe.why(problem, "nonesuch")


def test_backends_that_could_run_it_too_are_listed(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.CudaBackend, "why_not", lambda self, problem: None)
    assert "reference could, if asked for" in ttnn_moe.why(_problem(device="cpu"), "cuda")


def test_the_command_puts_equal_answers_together(gpu: None) -> None:
    arguments = ["why", "--tokens", "1,64,4096", "--hidden", "2080"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert done.output.startswith("T=1 T=64 T=4096:\n  cuda runs it, with Triton kernels, since")
    assert "2080" in done.output and "\n  reference does not" in done.output


def test_the_command_refuses_what_is_no_number() -> None:
    with pytest.raises(ContractError, match="numbers like"):
        CliRunner().invoke(app, ["why", "--tokens", "many"], catch_exceptions=False)
