"""What backends offer beside the operator is declared, and exchanges say why they cannot serve a layer."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ttnn_moe import BackendUnavailable, Placement, Problem
from ttnn_moe.ascend import operators
from ttnn_moe.ascend.backend import AscendBackend
from ttnn_moe.ascend.machine import Machine
from ttnn_moe.backend import AlignsRows, Backend, ChecksItself, Explains, NamesVersions, RunsOnNpu
from ttnn_moe.cuda.backend import CudaBackend
from ttnn_moe.parallel import exchanges
from ttnn_moe.parallel.exchanges import EXCHANGES, DispatchCombine, Topology, agreement
from ttnn_moe.reference import ReferenceBackend
from ttnn_moe.tenstorrent.backend import TenstorrentBackend

EXTRAS = {
    CudaBackend: {Explains},
    TenstorrentBackend: {AlignsRows},
    AscendBackend: {ChecksItself, NamesVersions, RunsOnNpu},
    ReferenceBackend: set(),
}


@pytest.mark.parametrize("kind", EXTRAS, ids=lambda kind: kind.name)
def test_each_backend_offers_what_it_declares(kind: Callable[[], Backend]) -> None:
    backend = kind()
    assert isinstance(backend, Backend)
    offered = {
        extra for extra in (AlignsRows, ChecksItself, Explains, NamesVersions, RunsOnNpu) if isinstance(backend, extra)
    }
    assert offered == EXTRAS[kind]


class OnNpus(AscendBackend):
    """On a machine of NPUs, as far as an exchange asks. names: the operators that its torch_npu has."""

    def __init__(self, *names: str, no_group: str | None = None, buffer: str = "4000"):
        self._npu, self._no_group = types.SimpleNamespace(**dict.fromkeys(names)), no_group
        self._machine = Machine("9.0.0", lacks=tuple(operators.missing(self._npu, operators.EXCHANGE)), buffer=buffer)

    def npu(self) -> types.SimpleNamespace:
        return self._npu

    def machine(self) -> Machine:
        return self._machine

    def why_no_group(self, group: object) -> str | None:
        return self._no_group


PROBLEM = Problem(128, 128, 8, 2048, 768, torch.bfloat16, D=8)
PLACEMENT = Placement.uniform(128, 8, 0)
ON_NPUS = OnNpus(*operators.EXCHANGE)


@pytest.fixture(autouse=True)
def eight_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks of one server say what this one says."""
    monkeypatch.setattr(agreement, "machines", lambda backend, group: [backend.machine()] * PLACEMENT.D)
    monkeypatch.setattr(agreement, "gather", lambda value, group: [value] * PLACEMENT.D)


@pytest.mark.parametrize(
    ("backend", "problem", "reason"),
    [
        (ReferenceBackend(), PROBLEM, "backend 'reference' has no exchange of its own"),
        (OnNpus(), PROBLEM, "this torch_npu has no npu_moe_distribute_dispatch_v2"),
        (ON_NPUS, Problem(512, 128, 8, 2048, 768, D=8), "a process has 1 token or more, at most"),
        (OnNpus(*operators.EXCHANGE, buffer="1"), PROBLEM, "export HCCL_BUFFSIZE="),
        (OnNpus(*operators.EXCHANGE, no_group="the process group has no HCCL"), PROBLEM, "has no HCCL"),
    ],
)
def test_an_exchange_says_why_it_cannot_and_auto_takes_the_next(
    backend: Backend, problem: Problem, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topology = Topology(PLACEMENT, backend)
    monkeypatch.setattr(exchanges, "DISPATCH_FROM", 8)
    assert reason in (DispatchCombine.why_not(problem, topology) or "")
    static = "all_gather" if isinstance(backend, RunsOnNpu) else "all_to_all"
    assert exchanges.choose("auto", problem, topology).name == static
    with pytest.raises(BackendUnavailable, match="exchange 'dispatch_combine' cannot run here") as error:
        exchanges.choose("dispatch_combine", problem, topology)
    assert reason in str(error.value).splitlines()[1]


def test_a_layer_that_was_not_made_took_no_number_of_tokens() -> None:
    """HCCL makes a group's buffers when it is named. Where that fails, a layer of fewer tokens may follow."""

    class Group:
        """Of processes."""

    class Full(OnNpus):
        def group_name(self, group: object) -> str:
            raise BackendUnavailable("no memory for HCCL's buffers")

    group = Group()
    topology = Topology(PLACEMENT, Full(*operators.EXCHANGE), group)  # type: ignore[arg-type]
    with pytest.raises(BackendUnavailable, match="no memory for HCCL's buffers"):
        DispatchCombine.of(PROBLEM, topology)
    assert DispatchCombine.why_not(replace(PROBLEM, T=64), topology) is None


def test_an_exchange_that_can_serve_has_no_reason() -> None:
    topology = Topology(PLACEMENT, ON_NPUS)
    assert {kind.name: kind.why_not(PROBLEM, topology) for kind in EXCHANGES} == dict.fromkeys(
        ("dispatch_combine", "all_gather", "all_to_all", "hierarchical")
    )


@pytest.mark.parametrize(
    ("backend", "D", "want"),
    [
        (ReferenceBackend(), 8, ["all_to_all"]),
        (ReferenceBackend(), 16, ["all_to_all"]),
        (ON_NPUS, 8, ["all_gather", "all_to_all"]),
        (ON_NPUS, 16, ["dispatch_combine", "all_gather", "all_to_all"]),
    ],
)
def test_what_auto_tries(backend: Backend, D: int, want: list[str]) -> None:
    tried = exchanges.automatic(Topology(Placement.uniform(128, D, 0), backend))
    assert [kind.name for kind in tried] == want


def test_all_gather_leaves_too_many_rows_to_all_to_all() -> None:
    topology = Topology(PLACEMENT, ON_NPUS)
    large = Problem(32768, 128, 8, 2048, 768, D=8)
    reason = exchanges.AllGather.why_not(large, topology)
    assert reason is not None and str(32768 * 8 * 8 * 4096) in reason and "all_to_all" in reason
    assert exchanges.choose("auto", large, topology).name == "all_to_all"
