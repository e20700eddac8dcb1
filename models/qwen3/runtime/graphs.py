"""Work that is run again on whatever its buffers hold: a graph of the device, or the operators themselves."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ttnn_moe.accelerator import is_accelerator, module_of

Progress = Callable[[int, int], None]
"""Called with graphs captured so far and graphs in all."""

Inputs = Callable[[], dict[str, list[int]]]
"""Operators' arguments, by name, that a replay takes from the host; see RowCache.replay_inputs."""

Alone = Callable[[], AbstractContextManager[object]]
"""Inside, work of several ranks sends nothing: what it compiles and allocates is all it does."""


@dataclass(frozen=True)
class Captured:
    """Something to run again.

    Attributes:
        replay: runs it. out: where it leaves its result.
    """

    replay: Callable[[], None]
    out: Tensor


class Graphs(Protocol):
    """How a device runs work again. Graphs of one object share memory, and one of them runs at a time.

    Attributes:
        ahead: a replay may be launched while the device still runs the one before.
        counted: a step leaves padding out of the experts, by a number of valid rows on the device.
        early: a capture is no step. Else it belongs to a step, which other ranks take too.
    """

    ahead: bool
    counted: bool
    early: bool

    def begin(self, tokens: int, most: int) -> int | None:
        """A step of so many tokens comes next: the tokens of the graph to take, from `tokens` to `most`.

        None: no graph serves; the step runs once, as it is.
        """

    def capture(self, run: Callable[[], Tensor], inputs: Inputs | None = None) -> Captured:
        """Capture what `run` does, after running it once.

        Args:
            run: launches kernels on the current stream, waits for nothing, and returns the result.
            inputs: asked at each replay; None: operators take nothing from the host.
        """


class Again:
    """Without a graph: the operators run again. It stands in for a device's graphs on the CPU.

    Args:
        alone: around a capture.
    """

    ahead = counted = early = True

    def __init__(self, alone: Alone = nullcontext):
        self._alone = alone

    def begin(self, tokens: int, most: int) -> int | None:
        """See Graphs."""
        return tokens

    @torch.inference_mode()
    def capture(self, run: Callable[[], Tensor], inputs: Inputs | None = None) -> Captured:
        """See Graphs."""
        with self._alone():
            out = run()

        def again() -> None:
            out.copy_(run())

        return Captured(again, out)


_CAPTURES = threading.Lock()
"""One thread captures at a time: torch waits for the device before a capture, which no GPU allows during another."""
_FREE: dict[int, list[Any]] = {}
"""Streams of each GPU whose graphs are gone."""


def _stream_of(module: Any, owner: object) -> Any:
    """A stream on which all graphs of an owner warm up and are captured; no other owner has it meanwhile.

    CUDA kernels keep a workspace for each stream that they ran on, for the life of the process. So on a GPU the stream,
    and its workspaces, serve the next owner when this one is gone. (The stream that torch.cuda.graph takes by itself is
    of the device of a process's first capture.)
    """
    if module is not torch.cuda:
        return module.Stream()
    free = _FREE.setdefault(torch.cuda.current_device(), [])
    stream = free.pop() if free else torch.cuda.Stream()
    weakref.finalize(owner, free.append, stream).atexit = False
    return stream


class DeviceGraphs:
    """CUDA graphs, or NPU graphs: torch.npu has the same functions under the same names.

    Args:
        module: torch.cuda or torch.npu, whose current device captures. new: makes an empty graph.
        alone: around what comes before a capture. options: of module.graph.
    """

    ahead = counted = early = True

    def __init__(self, module: Any, new: Callable[[], Any], alone: Alone = nullcontext, **options: Any):
        self._module, self._new, self._alone, self._options = module, new, alone, options
        self._pool = module.graph_pool_handle()
        self._stream = _stream_of(module, self)

    def begin(self, tokens: int, most: int) -> int | None:
        """See Graphs."""
        return tokens

    @torch.inference_mode()
    def capture(self, run: Callable[[], Tensor], inputs: Inputs | None = None) -> Captured:
        """See Graphs."""
        module = self._module
        self._stream.wait_stream(module.current_stream())
        with module.stream(self._stream), self._alone():
            run()  # kernels compile and workspaces are made outside the graph
        module.current_stream().wait_stream(self._stream)
        graph = self._new()
        with _CAPTURES, module.graph(graph, pool=self._pool, stream=self._stream, **self._options):
            out = run()
        return Captured(self.replay_of(graph, inputs), out)

    def replay_of(self, graph: Any, inputs: Inputs | None) -> Callable[[], None]:
        """What runs the graph again."""
        return graph.replay


class CudaGraphs(DeviceGraphs):
    """CUDA graphs. What other threads of the process do meanwhile ends no capture.

    torch refuses them two things then: to wait for the whole device, and random numbers of its own generator.
    """

    def __init__(self, alone: Alone = nullcontext) -> None:
        super().__init__(torch.cuda, torch.cuda.CUDAGraph, alone, capture_error_mode="thread_local")


class NpuGraphs(DeviceGraphs):
    """NPU graphs, whose operators may take host numbers: torch_npu rewrites these tasks before a replay.

    A task must not be rewritten while an earlier replay still reads it, so no replay is launched ahead. A layer with a
    number of valid rows takes 14 device operations instead of 6, so padding runs through its experts. Never run on an
    NPU. Source: torch_npu/npu/graphs.py of 2.13, and op-plugin's page of NpuGraphOpHandler.
    """

    ahead = counted = False

    def __init__(self, module: Any, alone: Alone = nullcontext):
        super().__init__(module, module.NPUGraph, alone, auto_dispatch_capture=True)

    def replay_of(self, graph: Any, inputs: Inputs | None) -> Callable[[], None]:
        """See DeviceGraphs."""
        if inputs is None:
            return graph.replay

        def replay() -> None:
            graph.update(cpu_update_input=[inputs()])
            graph.replay()

        return replay


def graphs_for(device: torch.device, alone: Alone = nullcontext) -> Graphs:
    """The graphs of a device. alone: around what comes before a capture."""
    if not is_accelerator(device):
        return Again(alone)
    return NpuGraphs(module_of(device), alone) if device.type == "npu" else CudaGraphs(alone)
