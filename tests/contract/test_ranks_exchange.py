"""An exchange that ranks choose and make together, and shared memory between them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model_ranks import by_ranks
from ttnn_moe.ascend.backend import AscendBackend
from ttnn_moe.ascend.machine import Machine
from ttnn_moe.contract import Experts, Placement, Problem
from ttnn_moe.parallel import ExpertParallel, exchanges
from ttnn_moe.parallel.exchanges import Topology, hierarchical
from ttnn_moe.parallel.hierarchical import PeerStopped
from ttnn_moe.parallel.ranks import Ranks
from ttnn_moe.reference import ReferenceBackend


def attaching(ranks: Ranks, fails: int, error: Exception) -> object:
    """Shared memory of the ranks, which this rank cannot make or attach to."""

    def failing(*_: object) -> None:
        raise error

    if ranks.rank == fails:
        hierarchical.SharedMemory = failing
    placement = Placement.uniform(6, 3, ranks.rank)
    problem = Problem(8, 6, 2, 64, 32, torch.float32, D=3)
    sizes = hierarchical.sizes_of(problem, Topology(placement, ReferenceBackend()))
    transport = hierarchical._attach(sizes, placement, ranks.group)
    if ranks.rank == 0:  # it gives up the name; others may be here before
        assert not is_memory(transport._memory.name), "a further process could attach"
    return transport.rank


def is_memory(name: str) -> bool:
    """Whether it still names the memory of a group."""
    return os.path.lexists(name) and "memfd" in os.readlink(name)


def test_a_memory_that_is_given_up_leaves_no_name() -> None:
    """As where not all ranks attach, and nobody takes its name away."""
    problem, topology = (
        Problem(8, 6, 2, 64, 32, torch.float32, D=3),
        Topology(Placement.uniform(6, 3, 0), ReferenceBackend()),
    )
    memory = hierarchical.SharedMemory(hierarchical.sizes_of(problem, topology).layout)
    name = memory.name
    assert is_memory(name)
    del memory
    assert not is_memory(name)


@pytest.mark.parametrize("error", [OSError("no room"), MemoryError("no room"), OverflowError("no room")], ids=repr)
@pytest.mark.parametrize("fails", [0, 2])
def test_all_ranks_raise_at_once_where_one_has_no_shared_memory(fails: int, error: Exception, tmp_path: Path) -> None:
    begin, timeout = time.monotonic(), 40.0
    for failed in by_ranks(attaching, 3, tmp_path, fails, error, timeout=timeout):
        assert failed.kind == "BackendUnavailable", failed
        assert f"rank {fails}: {type(error).__name__}: no room" in failed.text and "rank 1:" not in failed.text
    assert time.monotonic() - begin < timeout / 2, "a rank waited for the timeout"


class OnNpus(AscendBackend):
    """On a machine of NPUs, as far as the choice of an exchange asks."""

    def __init__(self) -> None:
        self._npu, self._machine = SimpleNamespace(), Machine("9.0.0")

    def machine(self) -> Machine:
        return self._machine


def chosen_beside_npus(ranks: Ranks, exchange: str) -> None:
    """Rank 1 has no torch_npu, so its backend is another."""
    backend = ReferenceBackend() if ranks.rank == 1 else OnNpus()
    problem = Problem(8, 6, 2, 64, 32, torch.bfloat16, D=3)
    exchanges.choose(exchange, problem, Topology(Placement.uniform(6, 3, ranks.rank), backend))


@pytest.mark.parametrize("exchange", ["auto", "dispatch_combine"])
def test_ranks_with_other_kinds_of_backends_are_refused(exchange: str, tmp_path: Path) -> None:
    """Each would take an exchange of its own, and wait in it."""
    for failed in by_ranks(chosen_beside_npus, 3, tmp_path, exchange):
        assert failed.kind == "ContractError", failed
        got, expected = ["all_to_all"], ["all_gather", "all_to_all"]
        assert f"rank 1: exchanges of its backend: got {got}, expected {expected} as rank 0" in failed.text


def experts_fail(ranks: Ranks, timeout: float) -> list[tuple[str, str]]:
    """Three calls of a layer; rank 0 has no memory for its experts in the first, and calls again."""
    moe, calls = ReferenceBackend.moe, []

    def failing(*given: Any) -> None:
        calls.append(ranks.rank)
        if calls == [0]:
            raise MemoryError("no room")
        moe(*given)

    ReferenceBackend.moe = failing  # type: ignore[method-assign]
    experts = Experts.dense(torch.zeros(2, 64, 64), torch.zeros(2, 64, 32))
    problem, placement = Problem(8, 4, 2, 64, 32, torch.float32, D=2), Placement.uniform(4, 2, ranks.rank)
    layer = ExpertParallel(problem, experts, placement, None, "reference", "hierarchical", timeout=timeout)
    said = []
    for _ in range(3):
        with pytest.raises((MemoryError, PeerStopped)) as error:
            layer(torch.ones(4, 64), torch.tensor([[0, 2]] * 4).int(), torch.ones(4, 2))
        said.append((error.type.__name__, str(error.value).partition(",")[0]))
    return said


def test_a_rank_whose_experts_fail_ends_the_call_of_all(tmp_path: Path) -> None:
    """The others wait for its rows. Its next call is another one, in which they would not meet."""
    begin, timeout = time.monotonic(), 20.0
    stopped = ("PeerStopped", "rank 0 stopped in call 3")  # behind a dispatch, which is two
    own, other = by_ranks(experts_fail, 2, tmp_path, timeout)
    assert own == [("MemoryError", "no room"), stopped, stopped] and other == [stopped] * 3
    assert time.monotonic() - begin < timeout / 2, "a rank waited for the timeout"


def test_ranks_share_memory(tmp_path: Path) -> None:
    assert by_ranks(attaching, 3, tmp_path, -1, OSError()) == [0, 1, 2]
