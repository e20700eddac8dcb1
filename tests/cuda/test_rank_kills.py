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
@pytest.mark.parametrize(("gpus", "inter", "delay"), [(2, 1, 0.003), (2, 2, 0.01), (4, 1, 0.003), (4, 2, 0.01)])
def test_a_killed_process_is_named(gpus: int, inter: int, delay: float) -> None:
    """The others' kernels end within the timeout of 0.2 s, and each heap names the dead rank."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")
    arguments = [str(gpus), str(inter), str(delay)]
    done = subprocess.run([sys.executable, str(KILLS), *arguments], capture_output=True, text=True, timeout=60)
    seconds = re.findall(r"stopped Stopped\(peer=1, .*\) ([0-9.]+)", done.stdout)
    assert len(seconds) == gpus - 1, done.stdout + done.stderr
    assert max(map(float, seconds)) < 5
