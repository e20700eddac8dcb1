"""What backends offer beside the operator is declared, and exchanges say why they cannot serve a layer."""

from __future__ import annotations

import types
from collections.abc import Callable

import pytest
import torch

from ttnn_moe import BackendUnavailable, Placement, Problem
from ttnn_moe.ascend import operators
from ttnn_moe.ascend.backend import AscendBackend
from ttnn_moe.backend import AlignsRows, Backend, ChecksItself, Explains, NamesVersions, RunsOnNpu
from ttnn_moe.cuda.backend import CudaBackend
from ttnn_moe.parallel import exchanges
from ttnn_moe.parallel.exchanges import EXCHANGES, Topology
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

    def __init__(self, *names: str, no_group: str | None = None):
        self._npu, self._no_group = types.SimpleNamespace(**dict.fromkeys(names)), no_group

    def npu(self) -> types.SimpleNamespace:
        return self._npu

    def why_no_group(self, group: object) -> str | None:
        return self._no_group


PROBLEM = Problem(128, 128, 8, 2048, 768, torch.bfloat16, D=8)
PLACEMENT = Placement.uniform(128, 8, 0)


@pytest.mark.parametrize(
    ("backend", "problem", "reason"),
    [
        (ReferenceBackend(), PROBLEM, "backend 'reference' has no exchange of its own"),
        (OnNpus(), PROBLEM, "this torch_npu has no npu_moe_distribute_dispatch_v2"),
        (OnNpus(*operators.EXCHANGE), Problem(512, 128, 8, 2048, 768, D=8), "a process has 1 to 256 tokens"),
        (OnNpus(*operators.EXCHANGE), PROBLEM, "export HCCL_BUFFSIZE="),
        (OnNpus(*operators.EXCHANGE, no_group="the process group has no HCCL"), PROBLEM, "has no HCCL"),
    ],
)
def test_an_exchange_says_why_it_cannot_and_auto_takes_the_next(
    backend: Backend, problem: Problem, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "export" not in reason:
        monkeypatch.setenv("HCCL_BUFFSIZE", "4000")
    else:
        monkeypatch.setenv("HCCL_BUFFSIZE", "1")
    topology = Topology(PLACEMENT, backend)
    first, last = EXCHANGES
    assert (first.name, last.name) == ("dispatch_combine", "all_to_all")
    assert reason in (first.why_not(problem, topology) or "") and last.why_not(problem, topology) is None
    assert exchanges.choose("auto", problem, topology).name == "all_to_all"
    with pytest.raises(BackendUnavailable, match="exchange 'dispatch_combine' cannot run here") as error:
        exchanges.choose("dispatch_combine", problem, topology)
    assert reason in str(error.value).splitlines()[1]


def test_an_exchange_that_can_serve_has_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", "4000")
    topology = Topology(PLACEMENT, OnNpus(*operators.EXCHANGE))
    assert [kind.why_not(PROBLEM, topology) for kind in EXCHANGES] == [None, None]
