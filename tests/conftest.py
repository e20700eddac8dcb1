"""Options and fixtures that every test shares."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch

from durations import SECONDS
from paths import session_folder
from targets import TARGETS, Target


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", action="append", default=None, help="run the cases on this backend only")
    parser.addoption("--seeds", type=int, default=3, help="schedules of the Tenstorrent emulator to run")
    parser.addoption("--long", action="store_true", help="also what another test shows (marker long)")

    parser.addoption("--fault-runs", type=int, default=8, help="random faults of an expert-parallel group to run")
    parser.addoption("--fault-seed", type=int, default=1, help="seed of the first of them")


def pytest_configure(config: pytest.Config) -> None:
    session_folder()  # before there are workers, so that they inherit it


@pytest.fixture
def fault_runs(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--fault-runs")


@pytest.fixture
def fault_seed(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--fault-seed")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "schedule_seed" in metafunc.fixturenames:
        metafunc.parametrize("schedule_seed", range(1, 1 + metafunc.config.getoption("--seeds")))
    if "target" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--backend")
        unknown = set(asked or ()) - {target.backend for target in TARGETS}
        if unknown:
            raise pytest.UsageError(f"--backend: no such target {sorted(unknown)}")
        chosen = [target for target in TARGETS if asked is None or target.backend in asked]
        metafunc.parametrize("target", chosen, ids=str)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers take files, the longest first: no worker is left alone with a long one at the end.

    How long a file takes is what durations.py says, else what its tests' marks `slow` say.
    """
    if not config.getoption("--long"):
        again = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=again)
        items[:] = [item for item in items if item not in set(again)]
    costs: defaultdict[str, float] = defaultdict(float)
    for item in items:
        slow = item.get_closest_marker("slow")
        costs[_file(item)] += (slow.args[0] if slow.args else 20) if slow else 0.02
    costs |= {file: SECONDS[name] for file in costs if (name := file.removeprefix("tests/")) in SECONDS}
    items.sort(key=lambda item: -costs[_file(item)])


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TTNN_MOE_BACKEND", raising=False)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _no_device_left() -> Iterator[None]:
    """Close a Tenstorrent device or emulator that a file's tests left open: `probe` would tell the next file of it."""
    yield
    device = sys.modules.get("ttnn_moe.tenstorrent.device")
    if device is not None:
        device.close_device()


@pytest.fixture
def runnable(target: Target) -> Target:
    """The target, or a skip that says why this machine cannot run it."""
    from ttnn_moe import registry

    found = registry.probe(target.backend)
    if not found.available:
        pytest.skip(f"{target.backend}: {found.reason}")
    if target.backend == "tenstorrent":
        pytest.skip("tenstorrent: each case has a process of its own, in tests/tenstorrent/test_tenstorrent.py")
    return target
