"""ttnn-moe selfcheck: passes on a right backend, names what is wrong on a wrong one."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ascend_stand_in
import broken_backends
from command import run
from own_registry import own_registry
from processes import run_python
from ttnn_moe import BackendUnavailable, ContractError, registry
from ttnn_moe.reference import ReferenceBackend
from ttnn_moe.selfcheck import contract_cases, parallel_cases, report
from ttnn_moe.selfcheck.bounds import worst_error
from ttnn_moe.selfcheck.check import CALLS, Check, Outcome, measure, repeated
from ttnn_moe.selfcheck.runner import selfcheck


@pytest.fixture
def register() -> Iterator[Callable[[str, str], None]]:
    with own_registry() as register:
        yield register


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_reference_passes(dtype: torch.dtype) -> None:
    lines: list[str] = []
    assert selfcheck("reference", lines.append, dtype)
    ran = [line for line in lines if line.startswith("ok")]
    assert not [line for line in lines if line.startswith("FAIL")]
    assert lines[-1].startswith("passed: reference on cpu") and f"all {len(ran)} checks" in lines[-1]
    assert any(torch.__version__ in line for line in lines[:3])
    for operator in ("moe, plain", "gate_projection", "silu_mul", "down_projection", "prepared layer"):
        assert any(operator in line and " us" in line for line in ran)


def test_another_weight_format_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [case for case in contract_cases.CASES if case.name in ("plain", "one_token", "idle_expert_nan_weights")]
    monkeypatch.setattr(contract_cases, "CASES", few)
    for weight_format, extra in (("mxfp4", 3), ("int4_24", 0)):
        lines: list[str] = []
        assert selfcheck("reference", lines.append, weight_format=weight_format), "\n".join(lines)
        names = [line for line in lines if line.startswith("ok")]
        assert len(names) == len(few) + extra + 5 and sum("as gpt-oss" in name for name in names) == extra
        assert lines[-1].endswith(f"bfloat16, {weight_format} weights")
    with pytest.raises(ContractError, match="no cases of this format"):
        selfcheck("reference", lines.append, weight_format="nonesuch")


def test_a_report_has_the_checks_of_a_format_and_what_ended_them(register, monkeypatch: pytest.MonkeyPatch) -> None:
    class Offers(ReferenceBackend):
        def format_checks(self, weight_format: str) -> Iterable[Outcome | str]:
            yield Outcome(f"tile of {weight_format}", False, None, None, "its process died")
            yield f"the fastest tile of {weight_format}"
            raise RuntimeError("the device was lost")

    monkeypatch.setattr(contract_cases, "CASES", [])
    monkeypatch.setattr(broken_backends, "Offers", Offers, raising=False)
    register("offers", "broken_backends:Offers")
    lines: list[str] = []
    assert not selfcheck("offers", lines.append, weight_format="mxfp4")
    assert "FAIL tile of mxfp4: its process died" in lines and "the fastest tile of mxfp4" in lines
    assert "FAIL the other checks of mxfp4: RuntimeError: the device was lost" in lines
    assert any(line.startswith("ok   prepared layer") for line in lines), "the contract's checks follow"
    told = report.read(lines[-2])
    assert told["problems"] == {
        "tile of mxfp4": "its process died",
        "the other checks of mxfp4": "RuntimeError: the device was lost",
    }
    assert lines[-1].startswith("FAILED: offers") and "2 of " in lines[-1]


def test_a_wrong_backend_fails_and_is_told_where(register, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    register("forgetful", "broken_backends:Forgetful")
    assert run(monkeypatch, "selfcheck", "--backend", "forgetful") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("FAILED: forgetful") and "moe, plain" in lines[-1]
    assert "gate_projection" not in lines[-1], "the steps are right"


@pytest.mark.parametrize(
    ("backend", "seen"),
    [
        ("Overwrites", "down_projection, added to out, moe, added to out"),
        ("Narrow", "moe, fp32 out"),
        ("Overflows", "silu_mul"),
        ("Adds", "down_projection, down_projection, added to out"),
        ("Remembers", "prepared layer, other tokens"),
        ("Unbounded", "prepared layer, fewer tokens and a bound"),
    ],
)
def test_each_check_sees_its_mistake(backend: str, seen: str, register, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract_cases, "CASES", [])
    register(backend.lower(), f"broken_backends:{backend}")
    lines: list[str] = []
    assert not selfcheck(backend.lower(), lines.append)
    assert lines[-1].endswith(f"checks: {seen}")


def test_an_absent_backend_is_one_message(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    if registry.probe("ascend").available:
        pytest.skip("an NPU is here")
    assert run(monkeypatch, "selfcheck", "--backend", "ascend") == 2
    assert "backend 'ascend' is not available" in capsys.readouterr().err


def test_ascend_on_stand_ins_passes_operator_by_operator() -> None:
    lines: list[str] = []
    with ascend_stand_in.registered():
        assert selfcheck("ascend", lines.append), "\n".join(lines)
    for operator in ("npu_moe_init_routing_v2: rows", "npu_grouped_matmul: one group", "npu_swiglu", "moe, absent ids"):
        assert any(line.startswith(f"ok   {operator}") for line in lines)
    assert lines[-1].startswith("passed: ascend on cpu, in place of an NPU")
    assert any(line.startswith("ok   HCCL_BUFFSIZE=1 for Qwen3-30B-A3B on 16 ranks is refused") for line in lines)
    told = report.read(lines[-2])
    assert told["failed"] == [[]] and "environment: " in told["machine"][-1]  # type: ignore[index]


def test_one_process_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "")
    assert parallel_cases.start("cpu") == (0, 1)
    for wrong in ("two", "0"):
        monkeypatch.setenv("WORLD_SIZE", wrong)
        with pytest.raises(ContractError, match=f"WORLD_SIZE is no number of processes; got '{wrong}'"):
            parallel_cases.start("cpu")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(BackendUnavailable, match="no RANK"):
        parallel_cases.start("cpu")


def test_what_a_check_raises_is_its_failure() -> None:
    def fail() -> Tensor:
        raise RuntimeError("out of memory")

    outcome = measure(Check("x", fail, lambda: torch.zeros(1, 1), 1.0), "cpu")
    assert not outcome.passed and "out of memory" in str(outcome)


def test_results_that_change_from_run_to_run_fail() -> None:
    outcome = measure(Check("x", lambda: torch.rand(2, 2) + 1e6, lambda: torch.full((2, 2), 1e6), 1.0), "cpu")
    assert not outcome.passed and "two runs differ" in str(outcome)


def test_worst_error_sees_one_row_and_nan() -> None:
    want = torch.ones(4, 8)
    assert worst_error(want, want) == 0
    got = want.clone()
    got[2] *= 1.5
    assert worst_error(got, want) == pytest.approx(0.5)
    got[2, 0] = float("nan")
    assert worst_error(got, want) == float("inf")
    assert worst_error(want[:3], want) == float("inf")
    want[1, 0] = float("nan")
    assert worst_error(torch.ones(4, 8), want) == float("inf"), "a NaN that is hidden"


STAND_IN = """
import ascend_stand_in
import broken_backends
from ttnn_moe import __main__ as command, registry
registry.register("ascend", ascend_stand_in.TARGET)
"""
ONE_RANK_FAILS = """
import os
from ttnn_moe import __main__ as command, registry
wrong = os.environ["RANK"] == "1"
registry.register("forgetful", "broken_backends:Forgetful" if wrong else "ttnn_moe.reference:ReferenceBackend")
"""
# gloo's threads sometimes abort a process that ends by itself
RUN = """
import os, sys
try:
    command.main()
except SystemExit as end:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(end.code or 0)
"""


def torchrun(folder: Path, script: str, backend: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
    """`ttnn-moe selfcheck` in two processes."""
    (folder / "script.py").write_text(script + RUN)
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    command = [*launcher, folder / "script.py", "selfcheck", "--backend", backend]
    return run_python(*command, code=code, OMP_NUM_THREADS="1")


def test_under_torchrun_expert_parallelism_is_checked_too(tmp_path: Path) -> None:
    lines = torchrun(tmp_path, STAND_IN, "ascend").stdout.splitlines()
    assert not any(line.startswith("[rank 1] ") for line in lines), "it has nothing to say"
    for exchange in ("all_to_all", "all_gather", "dispatch_combine"):
        for what in (*parallel_cases.CHANGES, f", different results of {CALLS} equal calls"):
            assert any(f"ok   expert parallel over 2 ranks, {exchange}{what}: error" in line for line in lines)
    assert any("ok   HCCL_BUFFSIZE=1 for Qwen3-30B-A3B on 16 ranks is refused" in line for line in lines)
    assert lines[-1].startswith("[rank 0] passed: ascend on cpu, in place of an NPU: all ")
    told = report.read(lines[-2])
    assert told["failed"] == [[], []] and told["ranks"] == 2 and told["backend"] == "ascend"
    assert lines[-1].split("all ")[1].startswith(f"{len(told['checks'])} checks")  # type: ignore[arg-type]
    assert any(line.startswith("CANN 9.0.0, driver unknown") for line in told["machine"])  # type: ignore[attr-defined]


def test_under_torchrun_a_wrong_rank_says_so(tmp_path: Path) -> None:
    done = torchrun(tmp_path, ONE_RANK_FAILS, "forgetful", code=None)
    assert done.returncode != 0
    assert "[rank 1] FAILED: forgetful" in done.stdout
    first, second = report.read(done.stdout)["failed"]  # type: ignore[misc]
    # what the wrong rank's experts make of the other's tokens is wrong on both
    assert "moe, plain" in second and all(name.startswith("expert parallel") for name in first)


def test_a_report_is_one_line_that_can_be_read_back() -> None:
    outcomes = [
        Outcome("a", True, 0.0012345, 12.3456),
        Outcome("b", False, float("inf"), None),
        Outcome("c\nd", False, None, None, "é"),
    ]
    text = report.line(["CANN 9.0.0"], outcomes, {"e": "no NPU"}, None, backend="ascend", ranks=1)
    assert "\n" not in text and text.isascii() and text.startswith("ttnn-moe-selfcheck/1 {")
    assert report.read(f"[rank 0] {text} and more") == {
        "backend": "ascend",
        "ranks": 1,
        "machine": ["CANN 9.0.0"],
        "checks": {"a": [0.00123, 12.3], "b": ["inf", None], "c\nd": [None, None]},
        "refused": {"e": "no NPU"},
        "failed": None,
        "problems": {"c\nd": "é"},
    }
    with pytest.raises(ValueError, match="not found"):
        report.read("nothing")


def test_a_backend_whose_bits_change_fails_the_repeated_calls() -> None:
    assert measure(repeated("steady", lambda: torch.ones(2, 2)), "cpu").passed
    outcome = measure(repeated("unsteady", lambda: torch.rand(2, 2)), "cpu")
    assert not outcome.passed and outcome.error == CALLS - 1
