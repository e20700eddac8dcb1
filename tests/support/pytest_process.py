"""pytest in a process of its own, for what has to be set before anything is imported."""

from __future__ import annotations

import os
import subprocess
import sys

from paths import ROOT, python_path


def run_pytest(file: str, *arguments: str, **environment: str) -> None:
    """Run a file, named from the root of the checkout; it must pass, and hold a test that runs.

    Args:
        arguments: of pytest; "-n", "0" unless they say otherwise. environment: variables added to the caller's.
    """
    done = subprocess.run(
        [sys.executable, "-m", "pytest", file, "-q", "-p", "no:cacheprovider", "-n", "0", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=900,
        env={**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def run_interpreted(file: str, *arguments: str) -> None:
    """As run_pytest, in Triton's interpreter: Triton reads TRITON_INTERPRET when a kernel is defined."""
    run_pytest(file, *arguments, TRITON_INTERPRET="1")
