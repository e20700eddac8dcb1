"""Schedules: the operators give the same bits in all of them, and what only luck orders is found in each.

`--seeds 200` runs the operators in as many schedules.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from programs import KERNELS, buffer, corners, grid

from ttnn_moe.errors import ContractError
from ttnn_moe.tenstorrent import runtime
from ttnn_moe.tenstorrent.emulator import EmulatedChip, Kernel, Placeholder, Program, Result, Semaphore, library, run
from ttnn_moe.tenstorrent.emulator.run import SEED_VARIABLE, seed_of_environment

SEEDS = range(3)


def emulate(define: str, seed: int | None = None, cores: int = 2) -> Result:
    device = EmulatedChip()
    where = grid(cores)
    kernel = Kernel(
        "broken/sync_variant.cpp",
        "reader",
        where,
        [Placeholder("accessor", "a")],
        common_args=[*corners(cores), Placeholder("address", "a")],
        args={core: [i, cores] for i, core in enumerate(where)},
        defines={define: "1"},
    )
    program = Program([kernel], [buffer(0, where)], [Semaphore(0, 0, where)])
    tensors = {"a": device.tensor(torch.zeros(32, 32).bfloat16())}
    return run(program, device, tensors, root=KERNELS, check=False, seed=seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("define", ["READS_UNTOLD", "READS_BEFORE_IT_WAITS", "WRITES_UNTOLD", "DRAM_UNTOLD"])
def test_what_nothing_orders_is_found_in_every_schedule(define, seed):
    """Which of the two came first is luck, so the second of them is the finding."""
    found = emulate(define, seed).findings
    assert {finding.kind for finding in found} <= {"unordered-read", "unordered-write"} and found
    assert all(finding.place.startswith("broken/sync_variant.cpp:") for finding in found)
    assert all(("[seed" in str(finding)) == (seed != 0) for finding in found)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("define", ["TELLS", "DRAM_TELLS", "SIGNALS_IN_TIME", "PLAIN_STORE"])
def test_what_is_ordered_is_not_found(define, seed):
    assert emulate(define, seed).findings == []


@pytest.mark.parametrize("define, kinds", [("RACES", {"unordered-write"}), ("TAKES_TURNS", set())])
def test_two_roles_of_a_core(define, kinds):
    device, cores = EmulatedChip(), grid(1)
    kernels = [Kernel("broken/two_roles.cpp", role, cores, defines={define: "1"}) for role in ("reader", "writer")]
    result = run(Program(kernels, [buffer(0, cores), buffer(1, cores)]), device, {}, root=KERNELS, check=False)
    assert {finding.kind for finding in result.findings} == kinds


def test_a_mistake_that_only_another_schedule_shows(monkeypatch):
    """No two accesses race: one order of two increments leaves a wait for ever. The seed repeats it."""
    found = {seed: emulate("FIRST_COMES_FIRST", seed, cores=3).findings for seed in range(20)}
    dead = [seed for seed, findings in found.items() if findings]
    assert dead and len(dead) < len(found)
    assert {finding.kind for seed in dead for finding in found[seed]} == {"deadlock"}
    monkeypatch.setenv(SEED_VARIABLE, str(dead[-1]))
    (again,) = emulate("FIRST_COMES_FIRST", cores=3).findings
    assert again == found[dead[-1]][0]
    assert f"[seed {dead[-1]}]" in str(again)


def test_a_seed_gives_one_schedule_and_another_gives_another():
    first, again, other = (emulate("TELLS", seed) for seed in (5, 5, 6))
    assert (first.steps, first.cores) == (again.steps, again.cores)
    assert first.cores != other.cores


def test_a_seed_that_is_no_number(monkeypatch):
    monkeypatch.setenv(SEED_VARIABLE, "")
    assert seed_of_environment() == 0
    monkeypatch.setenv(SEED_VARIABLE, "9" * 5000)
    with pytest.raises(ContractError, match=f"{SEED_VARIABLE} is no seed"):
        seed_of_environment()
    monkeypatch.setenv(SEED_VARIABLE, "many")
    with pytest.raises(ContractError, match=f"{SEED_VARIABLE} is no seed.*many"):
        emulate("TELLS")


@pytest.fixture(scope="module")
def plain():
    """What the operators give in the emulator's own schedule."""
    if importlib.util.find_spec("ttnn_moe._planner") is None:
        pytest.skip("ttnn_moe._planner is not built: plans come from it")
    from mutation_run import OPERATORS, Runs

    runtime.use(library)
    runs = Runs()
    yield {operator: (runs.found(operator), runs.last) for operator in OPERATORS}
    runtime.use(None)


def test_operators_in_any_schedule(plain, schedule_seed):
    from mutation_run import Runs

    runs = Runs(schedule_seed)
    for operator, (found, values) in plain.items():
        assert runs.found(operator) == found == set(), f"{operator}, seed {schedule_seed}: {runs.findings()}"
        assert all(torch.equal(a, b) for a, b in zip(runs.last, values, strict=True)), operator
