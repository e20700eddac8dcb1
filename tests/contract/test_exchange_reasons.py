"""Why an exchange cannot serve a layer, and what a group does where one of its ranks fails: without processes."""

from __future__ import annotations

import platform
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ttnn_moe import Placement, Problem
from ttnn_moe.errors import BackendUnavailable, ContractError
from ttnn_moe.parallel.exchanges import AllGather, AllToAll, Exchange, Hierarchical, Topology, agreement, all_gather
from ttnn_moe.parallel.exchanges.hierarchical import SharedMemoryExchange, sizes_of
from ttnn_moe.parallel.exchanges.peer_memory import PeerMemoryExchange
from ttnn_moe.parallel.hierarchical import Nodes
from ttnn_moe.reference import ReferenceBackend

E, K, H = 48, 3, 64


def layer_of(D: int, T: int = 16, dtype: torch.dtype = torch.bfloat16) -> tuple[Problem, Topology]:
    return Problem(T, E, K, H, 32, dtype, D=D), Topology(Placement.uniform(E, D, 0), ReferenceBackend())


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """An x86 host with Linux, and ranks that no launcher started."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("system", "machine", "words"),
    [
        ("linux", "x86_64", None),
        ("linux", "AMD64", None),
        ("win32", "AMD64", "is Linux's"),
        ("linux", "aarch64", "this is aarch64"),
    ],
)
def test_shared_memory_is_for_linux_on_x86(
    system: str, machine: str, words: str | None, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    reason = SharedMemoryExchange.why_not(*layer_of(4))
    assert reason is None if words is None else words in str(reason) and "all_to_all" in str(reason)


@pytest.mark.parametrize(
    ("world", "local", "several"),
    [("8", "4", True), ("8", "8", False), ("8", None, False), (None, "4", False), ("", "4", False)],
)
def test_ranks_on_several_hosts_share_no_memory(
    world: str | None, local: str | None, several: bool, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchrun says it; who says nothing is on one host."""
    for name, value in (("WORLD_SIZE", world), ("LOCAL_WORLD_SIZE", local)):
        if value is not None:
            monkeypatch.setenv(name, value)
    reason = SharedMemoryExchange.why_not(*layer_of(8))
    assert ("several hosts" in str(reason)) == several == (reason is not None)


def test_one_rank_and_nodes_of_other_ranks_are_refused(here: None) -> None:
    assert "nobody to exchange with" in str(SharedMemoryExchange.why_not(*layer_of(1)))
    assert SharedMemoryExchange.why_not(*layer_of(2)) is None
    problem, topology = layer_of(8)
    assert SharedMemoryExchange.why_not(problem, replace(topology, nodes=Nodes(4, 2))) is None
    reason = SharedMemoryExchange.why_not(problem, replace(topology, nodes=Nodes(3, 2)))
    wrong = "the nodes are not those of this group; got 6 ranks; expected 8; to fix it: "
    assert reason == wrong + "give Nodes of 8 ranks, or leave nodes out"
    assert PeerMemoryExchange.why_not(problem, replace(topology, nodes=Nodes(3, 2), wire=problem.dtype)) == reason


@pytest.mark.parametrize("exchange", [SharedMemoryExchange, PeerMemoryExchange])
def test_sizes_that_the_protocol_refuses_name_another_exchange(exchange: type[Exchange], here: None) -> None:
    problem, topology = layer_of(8)
    reason = str(exchange.why_not(replace(problem, H=12), replace(topology, wire=problem.dtype)))
    assert "not fit vector copies" in reason and reason.endswith("; to fix it: exchange='all_to_all'")


def test_nodes_have_as_many_ranks_as_divide_the_group() -> None:
    nodes = {D: sizes_of(*layer_of(D)).shape.nodes for D in (1, 2, 6, 8, 12, 16, 48)}
    sizes = {D: (found.inter, found.intra) for D, found in nodes.items()}
    assert sizes == {1: (1, 1), 2: (1, 2), 6: (1, 6), 8: (1, 8), 12: (2, 6), 16: (2, 8), 48: (6, 8)}


def test_the_hierarchical_exchange_names_a_device_that_it_does_not_serve(here: None) -> None:
    problem, topology = layer_of(4)
    assert Hierarchical.why_not(problem, topology) is None
    assert Hierarchical.why_not(replace(problem, device="xpu"), topology) == (
        "no transport for xpu; to fix it: exchange='all_to_all'"
    )


def test_the_operators_of_npus_take_no_nodes() -> None:
    problem, topology = layer_of(4)
    on_npus = replace(problem, device="npu")
    assert "leave nodes out" in str(Hierarchical.why_not(on_npus, replace(topology, nodes=Nodes(2, 2))))
    assert "leave nodes out" not in str(Hierarchical.why_not(on_npus, topology))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_all_gather_is_refused_where_its_rows_take_too_much(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sorted rows of all tokens: T of each of D processes, K times, H wide."""
    need = 16 * 4 * K * H * dtype.itemsize
    problem, topology = layer_of(4, dtype=dtype)
    monkeypatch.setattr(all_gather, "MOST_BYTES", need)
    assert AllGather.why_not(problem, topology) is None
    reason = str(AllGather.why_not(replace(problem, T=17), topology))
    assert f"of all 4 processes' tokens take {need // 16 * 17} bytes, more than {need}" in reason
    assert "exchange='all_to_all'" in reason and AllToAll.why_not(replace(problem, T=17), topology) is None


@pytest.mark.parametrize(("D", "ordered"), [(1, False), (2, False), (3, True)])
def test_two_processes_leave_the_sum_to_the_library(D: int, ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two numbers have one sum, in whatever order."""
    monkeypatch.delenv(all_gather.DETERMINISTIC, raising=False)
    monkeypatch.setattr(agreement, "gather", lambda asked, group: [asked] * D)
    problem, topology = layer_of(D, T=5)
    made = AllGather.of(problem, topology)
    assert (made.ordered, made.tokens) == (ordered, 5)


@pytest.mark.parametrize("D", [2, 3])
def test_the_library_sums_no_parts_in_bf16(D: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would round the sum as well as the parts."""
    monkeypatch.setenv(all_gather.DETERMINISTIC, "true")
    monkeypatch.setattr(agreement, "gather", lambda asked, group: [asked] * D)
    problem, topology = layer_of(D)
    assert AllGather.of(problem, replace(topology, wire=torch.bfloat16)).ordered
    assert not AllGather.of(problem, topology).ordered


@pytest.mark.parametrize("mine", [None, ValueError("no room")])
@pytest.mark.parametrize("other", ["", "OSError: gone"])
def test_all_ranks_fail_where_one_does(mine: Exception | None, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which failed, and why; the own error is the cause."""
    monkeypatch.setattr(agreement, "gather", lambda said, group: [said, "", other])

    def do() -> None:
        with agreement.all_or_none(None, "it cannot be made", "another exchange"):
            if mine is not None:
                raise mine

    if mine is None and not other:
        return do()
    with pytest.raises(BackendUnavailable, match="it cannot be made.*another exchange") as error:
        do()
    assert ("rank 0: ValueError: no room" in str(error.value)) == (mine is not None)
    assert ("rank 2: OSError: gone" in str(error.value)) == bool(other)
    assert "rank 1" not in str(error.value) and error.value.__cause__ is mine


def test_ranks_tell_of_their_machines_once_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        """Of processes."""

    world, other, asked = Group(), Group(), []
    backend = SimpleNamespace(machine=lambda: "mine")
    monkeypatch.setattr(agreement, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=world)))
    monkeypatch.setattr(agreement, "gather", lambda value, group: asked.append(group) or [value, "theirs"])
    for group in (None, None, world, other, other, None):
        assert agreement.machines(backend, group) == ["mine", "theirs"]  # type: ignore[arg-type]
    assert asked == [None, other]


def test_ranks_that_ask_for_other_layers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(agreement, "gather", lambda said, group: [said, {**said, "wire": "torch.float16"}])
    with pytest.raises(ContractError, match="wire"):
        agreement.check_same(None, wire=torch.float32, timeout=30.0)
    monkeypatch.setattr(agreement, "gather", lambda said, group: [said, said])
    agreement.check_same(None, wire=torch.float32, timeout=30.0)
