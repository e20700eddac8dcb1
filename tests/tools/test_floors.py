"""The lowest versions of dependencies: constraints-lowest.txt pins what pyproject.toml promises.

`make test-lowest`, a part of `make test`, installs them and runs the demo.
"""

from __future__ import annotations

import importlib
import re
import sys

from paths import ROOT

tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")  # pytest brings tomli


def pairs(lines: list[str], sign: str) -> dict[str, str]:
    """Name and version of each requirement, which must be one name, the sign and one version."""
    found = [re.fullmatch(rf"([\w-]+){sign}([\d.]+)", line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if not match]
    return {match[1]: match[2] for match in found if match}


def test_the_file_pins_the_floors() -> None:
    promised = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pinned = [line for line in (ROOT / "constraints-lowest.txt").read_text().splitlines() if line[:1] not in ("#", "")]
    assert pairs(pinned, "==") == pairs(promised, ">=")
