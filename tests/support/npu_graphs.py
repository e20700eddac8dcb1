"""torch.npu's streams and graphs on a CPU: a capture records operators and refuses what waits for the host.

A replay runs the recorded operators again on the same tensors. As on an NPU, operators that take host numbers keep
those of their capture until `update`. A replay without an update before it is refused: there it would wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import Work
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

UPDATED = "npu_fused_infer_attention_score"
"""The operator whose host numbers torch_npu 2.13 can rewrite: torch_npu/npu/_npugraph_handlers/ifa_handler.py."""

WAITS = {
    *(getattr(torch.Tensor, name) for name in ("item", "tolist", "numpy", "cpu", "nonzero", "pin_memory")),
    *(getattr(torch.Tensor, f"__{name}__") for name in ("bool", "int", "float", "index", "contains")),
    *(torch.tensor, torch.as_tensor, torch.from_numpy, torch.nonzero, torch.equal, torch.unique, torch.bincount),
}
"""Functions that copy between host and device, or whose shapes depend on values."""


@dataclass
class Recorded:
    """One operator of a graph. fresh: tensors that it made, rather than views of its arguments."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    fresh: list[bool]


class NPUGraph:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.records: list[Recorded] = []
        self.auto_dispatch_capture = False
        self.updated = False
        self.replays = 0

    @property
    def tasks(self) -> list[Recorded]:
        """The operators that `update` rewrites."""
        return [record for record in self.records if record.function.__name__.startswith(UPDATED)]

    def update(self, cpu_update_input: list[dict[str, Any]]) -> None:
        if not self.auto_dispatch_capture:
            raise RuntimeError("capture with auto_dispatch_capture=True")
        given = cpu_update_input * len(self.tasks) if len(cpu_update_input) == 1 else cpu_update_input
        for record, inputs in zip(self.tasks, given, strict=True):
            record.kwargs |= {key: value for key, value in inputs.items() if key in record.kwargs}
        self.updated = True

    def replay(self) -> None:
        if self.tasks and not self.updated:
            raise RuntimeError("the graph waits for its update")
        self.updated, self.replays = False, self.replays + 1
        for record in self.records:
            again = tree_leaves(record.function(*record.args, **record.kwargs))
            for leaf in again:
                if isinstance(leaf, torch.ScriptObject):  # a collective; on an NPU the stream waits for it
                    Work.unbox(leaf).wait()
            for old, new, fresh in zip(tree_leaves(record.out), again, record.fresh, strict=True):
                if fresh:
                    old.copy_(new)


class _Refuse(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITS:
            raise RuntimeError(f"{func.__name__} in a capture: the host would wait for the NPU, or copy to it")
        return func(*args, **(kwargs or {}))


class _Record(TorchDispatchMode):
    def __init__(self, graph: NPUGraph):
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        with torch._C.DisableTorchFunction():
            out = func(*args, **kwargs)
        fresh = [isinstance(leaf, torch.Tensor) and _memory(leaf) not in given for leaf in tree_leaves(out)]
        self.graph.records.append(Recorded(func, args, kwargs, out, fresh))
        return out


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@dataclass
class Npu:
    """torch.npu, as much as graphs need. graphs: all that were captured."""

    graphs: list[NPUGraph] = field(default_factory=list)

    def NPUGraph(self) -> NPUGraph:
        self.graphs.append(NPUGraph())
        return self.graphs[-1]

    def graph_pool_handle(self) -> object:
        return object()

    def Stream(self) -> Stream:
        return Stream()

    def current_stream(self) -> Stream:
        return Stream()

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        yield

    @contextmanager
    def graph(
        self, graph: NPUGraph, pool: object, stream: Stream | None = None, auto_dispatch_capture: bool = False
    ) -> Iterator[None]:
        graph.auto_dispatch_capture = auto_dispatch_capture
        with _Refuse(), _Record(graph):
            yield


class Stream:
    def wait_stream(self, other: Stream) -> None:
        pass
