"""Every file that goes to tt-metal, and what plans and binds for it, names its licence in its first line."""

from __future__ import annotations

import pytest

from paths import ROOT

FOLDERS = ("device_kernels", "cpp/ttnn_ops", "cpp/planner", "cpp/bindings")


@pytest.mark.parametrize("folder", FOLDERS)
def test_first_line_of_every_file(folder: str) -> None:
    sources = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".cpp", ".hpp", ".txt")]
    assert sources
    lacks = [path.name for path in sources if "SPDX-License-Identifier: Apache-2.0" not in path.open().readline()]
    assert not lacks
