"""Ranks that start: what they need of a launcher, of each other and of a process."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel_layers import one_process
from ttnn_moe.errors import BackendUnavailable, ContractError
from ttnn_moe.parallel.ranks import Ranks, own_device, start


def test_ranks_are_refused_where_torch_distributed_is_started(tmp_path: Path) -> None:
    before = threading.active_count()
    with one_process(tmp_path), pytest.raises(ContractError, match="started already.*leave init_process_group out"):
        Ranks(dist.HashStore(), 0, 1)
    assert threading.active_count() == before


def test_a_rank_of_another_version_is_named() -> None:
    store = dist.HashStore()
    store.set("meeting1/1", json.dumps({"ttnn_moe": "0", "torch": torch.__version__, "ranks": "2"}))
    with pytest.raises(ContractError, match="rank 1: ttnn_moe: got 0, expected"):
        Ranks(store, 0, 2, timeout=2.0)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sets the variables of a launcher: rank 0 of 2, at a port that another process listens at."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "0"}
        for name, value in {**given, "MASTER_PORT": str(taken.getsockname()[1])}.items():
            monkeypatch.setenv(name, value)
        yield


@pytest.mark.parametrize("name, value, words", [("RANK", "0", "EADDRINUSE"), ("WORLD_SIZE", "two", "literal.*'two'")])
def test_ranks_that_do_not_reach_each_other_are_told_where(
    name: str, value: str, words: str, launched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(
        BackendUnavailable, match=rf"MASTER_ADDR=127.0.0.1, MASTER_PORT=\d+: .*{words}.*another MASTER_"
    ):
        start()


def test_an_empty_variable_of_the_launcher_is_an_absent_one(launched: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
    with pytest.raises(BackendUnavailable, match="got no RANK, MASTER_PORT in the environment"):
        start()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"device": []}, r"no collectives for this device; got \[\]"),
        ({"device": "tpu"}, "no collectives for this device; got 'tpu'"),
        ({"timeout": "long"}, "timeout is no time to wait; got timeout='long'"),
        ({"timeout": -1}, "timeout is no time to wait; got timeout=-1"),
    ],
    ids=str,
)
def test_what_no_ranks_start_with(given: dict[str, Any], words: str, launched: None) -> None:
    with pytest.raises(ContractError, match=words):
        start(**given)


@pytest.mark.parametrize("local", ["2", "-1"])
def test_a_rank_without_a_gpu_of_its_own_is_refused(
    local: str, launched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(BackendUnavailable, match=f"no cuda device of its own; got LOCAL_RANK={local}, and 2 devices"):
        start("cuda")


@pytest.mark.parametrize("given", [{}, {"LOCAL_RANK": ""}], ids=["none", "empty"])
@pytest.mark.parametrize("size, devices, found", [("2", 1, True), ("1", 4, True), ("2", 4, False)])
def test_a_rank_without_a_local_rank_takes_no_device_that_may_be_anothers(
    given: dict[str, str], size: str, devices: int, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun and mpirun set no LOCAL_RANK, and all processes of a host would share its first GPU."""
    taken: list[int] = []
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in {"WORLD_SIZE": size, **given}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    if found:
        assert own_device("cuda") == "cuda:0" and taken == [0]
        return
    with pytest.raises(BackendUnavailable, match=r"no LOCAL_RANK, and 4 devices; .*srun.*LOCAL_RANK=\$SLURM_LOCALID"):
        own_device("cuda")
    assert not taken


def twice(rank: int, port: int, folder: Path) -> None:
    launcher = {"RANK": f"{rank}", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    os.environ |= {**launcher, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    said = []
    for word in ("first", "second"):
        ranks = start(timeout=8.0)
        said += ranks.meet(f"{word} {rank}")
        ranks.close()
    (folder / f"{rank}").write_text(", ".join(said))
    os._exit(0)  # gloo's threads sometimes abort a process that ends by itself


def test_processes_start_ranks_again(tmp_path: Path) -> None:
    """torchrun keeps one store, in which the words of the first start stay."""
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.start_processes(twice, (kept.port, tmp_path), nprocs=2, start_method="fork")
    for rank in range(2):
        assert (tmp_path / f"{rank}").read_text() == "first 0, first 1, second 0, second 1"
