"""Every C++, CUDA and device source names its licence in its first line, as tt-metal asks. Python files name none."""

from __future__ import annotations

import pytest

from paths import ROOT

FOLDERS = ("benchmarks", "cpp", "device_kernels", "gpu_kernels", "tests")
ENDINGS = (".cpp", ".hpp", ".h", ".cu", ".cuh")


@pytest.mark.parametrize("folder", FOLDERS)
def test_first_line_of_every_file(folder: str) -> None:
    sources = [path for path in (ROOT / folder).rglob("*") if path.suffix in ENDINGS or path.name == "CMakeLists.txt"]
    assert sources
    lacks = [path.name for path in sources if "SPDX-License-Identifier: Apache-2.0" not in path.open().readline()]
    assert not lacks
