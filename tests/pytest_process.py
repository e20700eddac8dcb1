"""pytest in a process of its own, for what has to be set before anything is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_pytest(file: str, *arguments: str, **environment: str) -> None:
    """Run a file of tests/; it must pass, and hold a test that runs.

    Args:
        arguments: of pytest; "-n", "0" unless they say otherwise. environment: variables added to the caller's.
    """
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", f"tests/{file}", "-q", "-p", "no:cacheprovider", "-n", "0", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=900,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def run_interpreted(file: str, *arguments: str) -> None:
    """As run_pytest, in Triton's interpreter: Triton reads TRITON_INTERPRET when a kernel is defined."""
    run_pytest(file, *arguments, TRITON_INTERPRET="1")
