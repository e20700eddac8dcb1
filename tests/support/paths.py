"""Where things are in the checkout."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]
TINY = ROOT / "models" / "qwen3" / "tiny"


def python_path() -> str:
    """PYTHONPATH of a process that imports the package from the checkout, and the tests' helpers."""
    return os.pathsep.join((str(ROOT), str(SUPPORT), os.environ.get("PYTHONPATH", "")))


@functools.cache
def session_folder() -> Path:
    """A folder that the processes of a test session share; whoever made it removes it at its end."""
    name = "TTNN_MOE_TEST_SESSION"
    if name not in os.environ:
        os.environ[name] = tempfile.mkdtemp(prefix="ttnn-moe-tests-")
        atexit.register(shutil.rmtree, os.environ[name], ignore_errors=True)
    return Path(os.environ[name])
