"""A process dies while its GPU exchanges tokens with another's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

KILLS = Path(__file__).parents[1] / "support" / "rank_kills.py"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("inter", "delay"), [(1, 0.003), (2, 0.01)])
def test_a_killed_process_is_named(inter: int, delay: float) -> None:
    """The other's kernels end within the timeout of 0.2 s, and its heap names the dead rank."""
    arguments = [str(inter), str(delay)]
    done = subprocess.run([sys.executable, str(KILLS), *arguments], capture_output=True, text=True, timeout=60)
    found = re.search(r"stopped Stopped\(peer=1, .*\) ([0-9.]+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert float(found[1]) < 5
