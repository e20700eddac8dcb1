"""The Tenstorrent kernels on devices or simulators, every run in a process of its own.

Where they run: TTNN_MOE_TT_SIMULATORS (simulator libraries, separated as in PATH), else TT_METAL_SIMULATOR, else the
machine's card. Without any, all are skipped with the reason.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from paths import ROOT, SUPPORT
from tenstorrent_names import MESH_NAMES, NAMES
from ttnn_moe.tenstorrent import device as devices

pytestmark = pytest.mark.tt

RUNS = SUPPORT / "tenstorrent_runs.py"
SIMULATORS = "TTNN_MOE_TT_SIMULATORS"
LIMIT_S = 3600  # the answers on a 1x8 mesh take a simulator up to half an hour


def _machines() -> list[str]:
    named = os.environ.get(SIMULATORS) or os.environ.get(devices.SIMULATOR) or ""
    return [path for path in named.split(os.pathsep) if path] or ["card"]


MACHINES = _machines()


@dataclass(frozen=True)
class Found:
    """What a machine has: architecture and number of devices, or why it cannot be used."""

    arch: str = ""
    D: int = 0
    reason: str = ""


def environment(machine: str) -> dict[str, str]:
    """Of a process that runs there."""
    root = str(ROOT)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TTNN_MOE_TT_CACHE": "off"}
    if machine != "card":
        # what a functional simulator needs, and compiled kernels apart for each
        kept = Path.home() / ".cache" / "ttnn-moe" / "kernels" / hashlib.sha1(machine.encode()).hexdigest()[:12]
        env |= {
            devices.SIMULATOR: machine,
            "TT_METAL_SLOW_DISPATCH_MODE": "1",
            "TT_METAL_DISABLE_SFPLOADMACRO": "1",
            "TT_METAL_CACHE": os.environ.get("TTNN_MOE_TT_KERNELS", str(kept)),
        }
    return env


def start(machine: str, name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(RUNS), name],
        env=environment(machine),
        cwd=folder,
        text=True,
        errors="replace",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=LIMIT_S,
    )


@cache
def describe(machine: str, folder: Path) -> Found:
    with pytest.MonkeyPatch.context() as patch:
        if machine != "card":
            patch.setenv(devices.SIMULATOR, machine)
        probe = devices.probe()
    if not probe.available:
        return Found(reason=probe.reason)
    done = start(machine, "describe", folder)
    line = next((line for line in done.stdout.splitlines() if line.startswith("DEVICE ")), None)
    if line is None:
        raise AssertionError(f"{machine} does not open:\n{_tail(done.stdout)}")
    _, arch, D, _ = line.split()
    return Found(arch, int(D))


def _tail(text: str, lines: int = 40) -> str:
    """The end of it, without what ttnn says of every device that it opens."""
    kept = [line for line in text.splitlines() if "| info " not in line and "| warning " not in line]
    return "\n".join(kept[-lines:])


@pytest.fixture(params=MACHINES, ids=lambda path: Path(path).parent.name or path)
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Found]:
    found = describe(request.param, tmp_path_factory.getbasetemp())
    if found.reason:
        pytest.skip(f"tenstorrent: {found.reason}")
    return request.param, found


def _run(machine: tuple[str, Found], name: str, folder: Path, record: object) -> None:
    path, found = machine
    done = start(path, name, folder)
    said = [line for line in done.stdout.splitlines() if "error " in line and "|" not in line]
    record("device", found.arch)  # type: ignore[operator]
    record("said", said)  # type: ignore[operator]
    assert done.returncode == 0 and f"PASSED {name}" in done.stdout, (
        f"{name} on {found.arch} ended with {done.returncode}:\n{_tail(done.stdout)}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_one_device(machine: tuple[str, Found], name: str, tmp_path: Path, record_property) -> None:
    if machine[1].D > 1 and len(MACHINES) > 1:
        pytest.skip("run on the machine with one device")
    _run(machine, name, tmp_path, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("name", MESH_NAMES)
def test_mesh(machine: tuple[str, Found], name: str, tmp_path: Path, record_property) -> None:
    if machine[1].D < 4:
        pytest.skip(f"a mesh of 1x8 or 1x4 needs the devices; {machine[1].arch} here has {machine[1].D}")
    _run(machine, name, tmp_path, record_property)
