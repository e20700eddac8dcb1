"""Where things are in the checkout."""

from __future__ import annotations

import os
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]
TINY = ROOT / "models" / "qwen3" / "tiny"


def python_path() -> str:
    """PYTHONPATH of a process that imports the package from the checkout, and the tests' helpers."""
    return os.pathsep.join((str(ROOT), str(SUPPORT), os.environ.get("PYTHONPATH", "")))
