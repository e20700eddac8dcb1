"""Work that is run again on whatever its buffers hold: CUDA graphs, or without CUDA the operators themselves."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Captured:
    """Something to run again.

    Attributes:
        replay: runs it. out: where it leaves its result.
    """

    replay: Callable[[], None]
    out: Tensor


_ENDED: ContextVar[Callable[[], None] | None] = ContextVar("ended", default=None)


def layer_ended() -> None:
    """A model says that it has launched one more layer: a capture may go on in another graph from here."""
    if not torch.compiler.is_compiling() and (tell := _ENDED.get()) is not None:
        tell()


@torch.inference_mode()
def capture(run: Callable[[], Tensor], pool: Any, cuts: Collection[int] = ()) -> Captured:
    """Capture what `run` does on the current CUDA device, after running it once.

    Args:
        run: launches kernels on the current stream, waits for nothing, and returns the result.
        pool: torch.cuda.graph_pool_handle() of graphs that share memory, one of which runs at a time; None: no CUDA.
        cuts: numbers of layers after which another graph begins. Launching a graph takes the host longer the more
            kernels it has, and the GPU waits meanwhile: a short one first gives it something to do.
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
    graphs: list[torch.cuda.CUDAGraph] = []
    layers = 0
    with ExitStack() as current:

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            current.enter_context(torch.cuda.graph(graphs[-1], pool=pool))

        def ended() -> None:
            nonlocal layers
            layers += 1
            if layers in cuts:
                current.close()
                begin()

        begin()
        token = _ENDED.set(ended)
        try:
            out = run()
        finally:
            _ENDED.reset(token)

    def replay() -> None:
        for graph in graphs:
            graph.replay()

    return Captured(replay, out)
