"""Mistakes of one line in the device kernels are found by one small layer on three emulated cores."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from mutation import EQUIVALENT, Mutation
from mutations import MUTATIONS, table

from paths import ROOT
from ttnn_moe.tenstorrent import runtime
from ttnn_moe.tenstorrent.emulator import build, library

pytestmark = pytest.mark.slow(40)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """The operators as they are, and a cache of kernels that only these tests use."""
    if importlib.util.find_spec("ttnn_moe._planner") is None:
        pytest.skip("ttnn_moe._planner is not built: plans come from it")
    from mutation_run import OPERATORS, Runs

    engine, cache = build.engine(), tmp_path_factory.mktemp("builds")
    shutil.copy2(engine, cache / engine.name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(build.CACHE_VARIABLE, str(cache))
        patch.setattr(runtime, "_emulated", library)
        made = Runs()
        assert all(made.found(operator) == set() for operator in OPERATORS)
        yield made


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.file}-{m.mistake.replace(' ', '_')}")
def test_is_found(runs, mutation: Mutation, tmp_path: Path) -> None:
    from mutation_run import mutate

    found = runs.found(mutation.runs, mutate(mutation, tmp_path))
    if mutation.found == EQUIVALENT:
        assert mutation.reason and not found
    else:
        assert mutation.found in found


def test_every_file_has_one() -> None:
    there = {str(path.relative_to(ROOT / "device_kernels")) for path in (ROOT / "device_kernels").rglob("*.[ch]pp")}
    assert there == {mutation.file for mutation in MUTATIONS}


def test_the_documented_table_is_this_one() -> None:
    assert table() in (ROOT / "docs" / "emulator.md").read_text(), "python tests/tenstorrent/emulator/mutations.py"
