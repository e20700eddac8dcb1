"""Processes that share one model, over a store in a file; on the CPU a process starts by a fork, in milliseconds."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ttnn_moe.parallel.ranks import Ranks

Work = Callable[..., Any]


def by_ranks(
    work: Work,
    size: int,
    folder: Path,
    *args: Any,
    timeout: float = 30.0,
    device: str = "cpu",
    lost: Sequence[int] = (),
) -> list[Any]:
    """What work(ranks, *args) returns in each of `size` processes, or the exception it raises; None: it died.

    Args:
        timeout: of Ranks. device: "cpu", or "cuda" for a GPU each. lost: ranks whose end nobody waits for.
    """
    started = [
        get_context("fork" if device == "cpu" else "spawn").Process(
            target=_process, args=(work, rank, size, folder, args, timeout, device)
        )
        for rank in range(size)
    ]
    for process in started:
        process.start()
    deadline = time.monotonic() + 4 * timeout
    waited = [(rank, process) for rank, process in enumerate(started) if rank not in lost]
    for _, process in waited:
        process.join(max(deadline - time.monotonic(), 0))
    hung = [rank for rank, process in waited if process.is_alive()]
    for process in started:
        process.kill()
    assert not hung, f"ranks {hung} hang"
    files = [folder / f"{rank}.pkl" for rank in range(size)]
    return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]


def _process(
    work: Work, rank: int, size: int, folder: Path, args: tuple[Any, ...], timeout: float, device: str
) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    try:
        ranks = Ranks(dist.FileStore(str(folder / "store"), size), rank, size, device, timeout)
        with ranks.watched():
            result = work(ranks, *args)
    except Exception as error:
        kept = vars(error)
        result = Failed(type(error).__name__, str(error), kept.get("peer"))
    part = folder / f"{rank}.part"
    part.write_bytes(pickle.dumps(result))
    part.rename(folder / f"{rank}.pkl")
    os._exit(0)  # gloo's threads sometimes abort a process that ends by itself


class Failed:
    """An error of a rank. peer: of a RankStopped."""

    def __init__(self, kind: str, text: str, peer: int | None):
        self.kind, self.text, self.peer = kind, text, peer

    def __repr__(self) -> str:
        return f"{self.kind}: {self.text}"
