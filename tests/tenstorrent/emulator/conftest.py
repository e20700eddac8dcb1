from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ttnn_moe.errors import BackendUnavailable
from ttnn_moe.tenstorrent.emulator.build import compiler

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def a_compiler():
    try:
        compiler()
    except BackendUnavailable as error:
        pytest.skip(str(error))
