"""Python and pytest in a process of their own, for settings that a process reads once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from paths import ROOT, python_path


def run_python(
    *arguments: str | Path,
    code: int | None = 0,
    timeout: float = 300,
    cwd: Path = ROOT,
    without: tuple[str, ...] = (),
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS`, which imports this checkout and tests/support; return its output as text.

    Args:
        code: the exit code that the process must have; None: any. timeout: in seconds. cwd: its working directory.
        without: prefixes of the variables that the process must not inherit. environment: variables to add.
    """
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(without)}
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**inherited, "PYTHONPATH": python_path(), **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
    )
    assert code in (None, done.returncode), done.stdout[-4000:] + done.stderr[-8000:]
    return done


def run_pytest(*arguments: str, **environment: str) -> str:
    """Run pytest in one process; at least one test must pass and none fail.

    Args:
        arguments: of pytest, after "-n 0"; test files are named from the root of the checkout. A process takes some
            seconds to start, so one runs all files that it can. environment: variables to add.

    Returns:
        What pytest printed.
    """
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", *arguments]
    out = run_python(*command, timeout=900, **{"OMP_NUM_THREADS": "1", **environment}).stdout
    assert " passed" in out
    return out


def run_interpreted(*arguments: str, **environment: str) -> str:
    """As run_pytest, in Triton's interpreter: Triton reads TRITON_INTERPRET when a kernel is defined."""
    return run_pytest("-p", "interpreted", *arguments, TRITON_INTERPRET="1", **environment)
