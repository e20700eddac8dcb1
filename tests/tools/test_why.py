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
from ttnn_moe.cuda.jit import build
from ttnn_moe.errors import ContractError, RequestError

SIZES = {"T": 100, "E": 128, "K": 8, "H": 2048, "I": 768, "device": "cuda"}


def _problem(**change: object) -> Problem:
    return Problem(**(SIZES | change))  # type: ignore[arg-type]


@pytest.fixture(params=[(9, 0)])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU of some compute capability, as far as choosing goes."""
    monkeypatch.setattr(cuda.CudaBackend, "probe", classmethod(lambda cls: Probe(True, devices=("a GPU",))))
    pretend(monkeypatch, gpu_of(request.param))
    monkeypatch.setattr(build, "why_not", lambda: None)
    registry.look_again()
    yield
    monkeypatch.undo()
    registry.look_again()


@pytest.mark.parametrize(
    ("gpu", "change", "runs", "words"),
    [
        ((9, 0), {}, "sm90 (CUDA C++", ["few does not: it runs up to 24 pairs (T * K)"]),
        ((9, 0), {"T": 3}, "few (CUDA C++", []),
        ((9, 0), {"T": 4}, "sm90 (CUDA C++", ["few does not: it runs up to 24 pairs (T * K)"]),
        ((8, 0), {}, "sm80 (CUDA C++", ["sm90 does not: its code is for sm_90a, not sm_80"]),
        ((12, 1), {"dtype": torch.float16}, "sm80 (CUDA C++", ["not sm_120f"]),
        (
            (10, 0),
            {},
            "triton (Triton",
            ["few, sm90, sm80 do not: its code is for compute capability 8.x, 9.0 and 12.x, not 10.0"],
        ),
        ((9, 0), {"H": 2080}, "triton (Triton", ["few, sm90, sm80 do not:", "multiples of 64, not 2080 and 768"]),
        ((8, 6), {"dtype": torch.float32}, "triton (Triton", ["few, sm90, sm80 do not: it multiplies bf16 and fp16"]),
        ((8, 9), {"E": 1024}, "triton (Triton", ["sm_89 has: 99 KiB", "triton_few does not: it runs up to 32 pairs"]),
        ((8, 9), {"E": 1024, "T": 1}, "triton_few (Triton", ["few, sm90, sm80 do not: sorting"]),
        ((9, 0), {"T": 0}, "few (CUDA C++", []),
    ],
    indirect=["gpu"],
)
def test_the_kernels_of_a_gpu_are_named(gpu: None, change: dict[str, object], runs: str, words: list[str]) -> None:
    first, *others = str(ttnn_moe.why(_problem(**change))).splitlines()
    assert first.startswith(f"cuda runs it, with {runs}")
    assert all(reason in first for reason in words)
    assert words or ";" not in first
    assert [line.split()[0] for line in others] == [name for name in registry.backends() if name != "cuda"]
    assert all(" does not: " in line for line in others)


def test_what_stands_in_for_an_older_gpu_is_named(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTNN_MOE_CUDA_ARCH", "sm_80")
    why = str(ttnn_moe.why(_problem()))
    assert "sm80 (CUDA C++" in why and "not compute_80" in why
    monkeypatch.setenv("TTNN_MOE_CUDA_ARCH", "sm_61")
    with pytest.raises(ContractError, match="TTNN_MOE_CUDA_ARCH"):
        ttnn_moe.why(_problem())


def test_a_missing_compiler_is_named(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "why_not", lambda: "cuda.core is not installed")
    why = str(ttnn_moe.why(_problem()))
    assert "triton (Triton kernels); few, sm90, sm80 do not: cuda.core is not installed" in why


def test_rounding_is_that_of_the_family(gpu: None) -> None:
    backend = registry.choose(_problem(), "cuda")
    rounded = {T: backend.numerics(_problem(T=T)).expert_out for T in (1, 3, 4, 100)}
    assert rounded == {1: None, 3: None, 4: torch.bfloat16, 100: torch.bfloat16}


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
    said, *lines = _table(monkeypatch, "--tokens", "1,64,4096", "--hidden", "2080")
    assert said == "tensors on cuda: a GPU is here"
    rejected = [[name, "no"] for name in registry.backends() if name != "cuda"]
    for tokens, family in (("T=1", "triton_few"), ("T=64 T=4096", "triton")):
        title, columns, first, *others = lines[: 3 + len(rejected)]
        lines = lines[3 + len(rejected) :]
        assert title == f"MoE layer, {tokens}" and columns.split() == "backend runs it with, or why not".split()
        assert first.split()[:3] == ["cuda", "yes", family] and "2080" in first
        assert [line.split()[:2] for line in others] == rejected
    assert not lines


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tokens", "999999999999999999"], "too many tokens"),
        (["--tokens", "1", "--device", "hpu"], "torch cannot use this device"),
        (["--tokens", "1", "--heads", "3"], "query heads do not share"),
    ],
)
def test_what_the_operators_refuse_comes_before_any_table(options: list[str], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        CliRunner().invoke(app, ["why", "--operators", *options], catch_exceptions=False)


def test_a_backend_that_the_environment_names_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTNN_MOE_BACKEND", "foo")
    for asks in (lambda: ttnn_moe.why(_problem(device="cpu")), registry.resolve):
        with pytest.raises(BackendUnavailable, match="got 'foo', of TTNN_MOE_BACKEND; .*unset TTNN_MOE_BACKEND"):
            asks()


def test_triton_that_interprets_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    said, title, _, *rows = _table(monkeypatch, "--tokens", "1", "--dtype", "fp16")
    assert said == "tensors on cpu: no GPU is here" and title == "MoE layer, T=1"
    assert any(row.split()[1] == "yes" for row in rows)


def test_without_a_gpu_the_command_says_why_each_backend_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    if registry.probe("cuda").available:
        pytest.skip("a GPU is here")
    said, title, _, *rows = _table(monkeypatch, "--tokens", "1,512")
    assert said == "tensors on cpu: no GPU is here"
    assert title == "MoE layer, T=1 T=512" and rows[0].split() == ["reference", "yes"]
    title, _, *rows = _table(monkeypatch, "--tokens", "1,512", "--device", "cuda")
    assert title == "MoE layer, T=1 T=512: nothing runs it here"
    assert [row.split()[:2] for row in rows] == [[name, "no"] for name in registry.backends()]
    assert registry.probe("cuda").reason in rows[0] and "to fix it: move them to the CPU" in rows[-1]
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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "many"], "numbers like"),
        (["--topk", "129"], "K=129.*K <= E; to fix it: a K of 1 to 128"),
        (["--format", "mxfp4", "--hidden", "80"], "got 80; expected a multiple of 32; .*to 96"),
        (["--format", "int4_24", "--intermediate", "96"], "I does not fit int4_24.*a multiple of 64"),
    ],
)
def test_the_command_refuses_what_cannot_be(arguments: list[str], words: str) -> None:
    with pytest.raises(ContractError, match=words):
        CliRunner().invoke(app, ["why", *arguments], catch_exceptions=False)


def test_the_other_operators_of_a_layer_have_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    lines = _table(monkeypatch, "--tokens", "1,512", "--device", "cpu", "--operators")
    at = lines.index("Other operators of a decoder layer, T=1 T=512")
    assert lines[at + 1].split() == "operator runs on and not on".split()
    names = ["norm_linear", "norm_rope_write", "decode_attention", "prefill_attention"]
    names += ["bucketed_norm_rope_write", "bucketed_attention"]
    rows = [line.split() for line in lines[at + 2 :]]
    assert [row[0] for row in rows] == [*names, "linear_add", "norm_route", "route", "rms_norm"]
    assert all("torch" in row and "the tensor is not on a CUDA device" in " ".join(row) for row in rows)
