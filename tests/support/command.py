"""The ttnn-moe command in this process."""

from __future__ import annotations

import sys

import pytest

from ttnn_moe import __main__ as command


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    """Run the command in this process; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["ttnn-moe", *args])
    with pytest.raises(SystemExit) as exit_:
        command.main()
    code = exit_.value.code
    return code if isinstance(code, int) else int(code is not None)
