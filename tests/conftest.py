"""Options and fixtures that every test shares."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from targets import TARGETS, Target


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", action="append", default=None, help="run the cases on this backend only")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "target" in metafunc.fixturenames:
        asked = metafunc.config.getoption("--backend")
        unknown = set(asked or ()) - {target.backend for target in TARGETS}
        if unknown:
            raise pytest.UsageError(f"--backend: no such target {sorted(unknown)}")
        chosen = [target for target in TARGETS if asked is None or target.backend in asked]
        metafunc.parametrize("target", chosen, ids=str)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What workers take at a time, the longest first: a slow test, or the other tests of a file.

    A slow test that needs a fixture of its module stays with its file.
    """
    costs: Counter[str] = Counter()
    groups = {}
    for item in items:
        slow, file = item.get_closest_marker("slow"), item.nodeid.partition("::")[0]
        fixtures = item._fixtureinfo.name2fixturedefs.values() if isinstance(item, pytest.Function) else ()
        alone = slow and not any(fixture.scope == "module" for found in fixtures for fixture in found)
        groups[item] = item.nodeid if alone else file
        costs[groups[item]] += (slow.args[0] if slow.args else 20) if slow else 1
        if not alone:
            item.add_marker(pytest.mark.xdist_group(file))
    items.sort(key=lambda item: -costs[groups[item]])


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TTNN_MOE_BACKEND", raising=False)
    torch.manual_seed(0)


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
