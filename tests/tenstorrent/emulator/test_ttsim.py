"""The same programs in the emulator and on the device or simulator that ttnn opens: equal, or within bf16 rounding.

Runs where ttnn is and TT_METAL_SIMULATOR names a simulator (or a card is there). Each case in a process of its own, one
at a time: an error of the simulator ends the process.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import filelock
import pytest
import torch
from device_cases import CASES
from programs import KERNELS

from processes import run_python
from ttnn_moe.tenstorrent.emulator import EmulatedChip, run

HERE = Path(__file__).parent


def _missing() -> str | None:
    if importlib.util.find_spec("ttnn") is None:
        return "ttnn is not installed"
    if not os.environ.get("TT_METAL_SIMULATOR") and not list(Path("/dev").glob("tenstorrent/*")):
        return "no Tenstorrent device is here, and TT_METAL_SIMULATOR names no simulator"
    return None


pytestmark = [pytest.mark.tt, pytest.mark.slow, pytest.mark.skipif(_missing() is not None, reason=_missing() or "")]


@pytest.mark.parametrize("name", CASES)
def test_same_as_the_device(name, tmp_path):
    saved = tmp_path / "out.pt"
    with filelock.FileLock(str(Path(os.environ.get("TMPDIR", "/tmp")) / "ttnn-moe-one-simulator.lock")):
        done = run_python(HERE / "on_device.py", saved, name, timeout=600, cwd=tmp_path)
    assert saved.exists(), (done.stdout + done.stderr)[-3000:]
    on_device = torch.load(saved)
    chip = "p150" if "BLACKHOLE" in on_device["arch"].upper() else "n150"
    case = CASES[name]
    if chip not in case.chips:
        pytest.skip(f"{name} is not for {chip}")
    device = EmulatedChip(chip)
    tensors = {key: device.tensor(values, dtype, tiled=tiled) for key, (values, dtype, tiled) in case.inputs().items()}
    shape, dtype, tiled = case.out
    tensors["out"] = device.empty(shape, dtype, tiled=tiled)
    run(case.program(), device, tensors, root=KERNELS)
    got, want = tensors["out"].read(), on_device[name]
    if case.exact:
        assert torch.equal(got, want)
    else:
        apart = ((got.double() - want.double()).norm() / want.double().norm()).item()
        assert apart <= case.bound, f"{apart:.2e} apart"
