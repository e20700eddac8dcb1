"""Scripts of benchmarks/ as modules."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from paths import ROOT


def script(name: str) -> ModuleType:
    """benchmarks/<name>.py, imported: the scripts import each other by bare names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        return importlib.import_module(name)
