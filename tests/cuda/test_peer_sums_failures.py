"""Sums of ranks by kernels: what sends nothing before a capture, and a rank that has no memory for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_peer_sums import BF16, HostRank, needs_compiler, parts_of, run

from host_kernels import HostKernels
from model_ranks import by_ranks
from ttnn_moe.cuda.parallel import heap, sums
from ttnn_moe.parallel.ranks import Ranks
from ttnn_moe.parallel.ranks import sums as ranks_sums
from ttnn_moe.parallel.ranks.sums import PeerMemorySums


@needs_compiler
def test_sums_send_nothing_before_a_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their kernels compile, and a rank that fails there is no call apart from the others."""
    run(HostKernels(tmp_path), monkeypatch)
    at, (parts, x) = HostRank(2, 0), parts_of(2, 3, 64, BF16, 0)
    one = PeerMemorySums.__new__(PeerMemorySums)
    one._alone, one.heap = False, at.heap
    before = [memory.clone() for memory in at.heaps]
    with one.alone():
        sums.add(at.heap, parts[0], x.clone())
        sums.add_many(at.heap, parts[0], x.clone())
        sums.gather(at.heap, parts[0], torch.zeros(3, 128, dtype=BF16))
    assert all(map(torch.equal, at.heaps, before)) and at.heap.report() is None
    assert sums._add.cache_info().currsize == sums._add_many.cache_info().currsize == 1
    at.expect(parts)
    sums.add(at.heap, parts[0], x)
    assert at.sent(parts[0])


def made(ranks: Ranks) -> None:
    """The sums of ranks, of which rank 1 has no pinned memory."""

    def shared(nbytes: int, *_: object) -> tuple[torch.Tensor, list[int]]:
        return torch.zeros(nbytes, dtype=torch.uint8), [0, 0]

    def failing(*_: object) -> Iterator[Any]:
        raise RuntimeError("no pinned memory")

    ranks_sums.symmetric.shared = shared  # type: ignore[assignment]
    if ranks.rank == 1:
        heap.Heap = failing  # type: ignore[assignment, misc]
    PeerMemorySums(ranks, 64, 64)


def test_all_ranks_raise_where_one_has_no_memory_for_its_sums(tmp_path: Path) -> None:
    """Else it would leave, and the others wait for it in their next meeting."""
    for failed in by_ranks(made, 2, tmp_path, timeout=20.0):
        assert failed.kind == "BackendUnavailable" and "rank 1: RuntimeError: no pinned memory" in failed.text
