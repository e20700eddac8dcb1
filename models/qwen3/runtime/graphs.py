"""Work that is run again on whatever its buffers hold: a CUDA graph, or without CUDA the operators themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Progress = Callable[[int, int], None]
"""Called with graphs captured so far and graphs in all."""


@dataclass(frozen=True)
class Captured:
    """Something to run again.

    Attributes:
        replay: runs it. out: where it leaves its result.
    """

    replay: Callable[[], None]
    out: Tensor


@torch.inference_mode()
def capture(run: Callable[[], Tensor], pool: Any) -> Captured:
    """Capture what `run` does on the current CUDA device, after running it once.

    Args:
        run: launches kernels on the current stream, waits for nothing, and returns the result.
        pool: torch.cuda.graph_pool_handle() of graphs that share memory, one of which runs at a time; None: no CUDA.
    """
    if pool is None:
        out = run()

        def again() -> None:
            out.copy_(run())

        return Captured(again, out)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # kernels compile and workspaces are made outside the graph
        run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        out = run()
    return Captured(graph.replay, out)
