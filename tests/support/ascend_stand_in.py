"""The Ascend backend on a CPU: torch_npu's operators bound to the implementations of ascend_operators.py.

With torch_npu installed (make test-ascend) the operators are its own, over stand-in libraries. Without it they are
defined from ascend_schemas.py, and a small module takes torch_npu's place.
"""

from __future__ import annotations

import os
import tempfile
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

import ascend_attention_operators
import ascend_exchange_operators
import ascend_libraries
from ascend_operators import IMPLEMENTATIONS
from ascend_schemas import SCHEMAS
from own_registry import own_registry
from ttnn_moe.ascend.backend import AscendBackend
from ttnn_moe.ascend.machine import Machine
from ttnn_moe.backend import Probe

TARGET = f"{__name__}:OnCpu"
CANN = "9.0.0"
_KEPT: list[object] = []


class OnCpu(AscendBackend):
    """AscendBackend whose tensors are on the CPU."""

    device = "cpu"

    @classmethod
    def probe(cls) -> Probe:
        return Probe(True, devices=("cpu, in place of an NPU",))

    def npu(self) -> Any:
        return npu()

    def machine(self) -> Machine:
        return Machine(cann=CANN, server="here", cards=8, buffer=os.environ.get("HCCL_BUFFSIZE", ""))

    def why_no_group(self, group: object) -> str | None:
        return None

    def group_name(self, group: object) -> str:
        return ascend_exchange_operators.GROUP


def real() -> bool:
    """Whether the operators are torch_npu's own."""
    return ascend_libraries.why_not() is None


@cache
def npu() -> Any:
    """torch_npu, or what takes its place, with CPU implementations bound."""
    if real():
        # once loaded they are needed no more; a process that ends by os._exit would leave them behind
        with tempfile.TemporaryDirectory(prefix="ascend-stand-ins-") as folder:
            module: Any = ascend_libraries.import_torch_npu(Path(folder))
    else:
        library = torch.library.Library("npu", "DEF")
        for schema in SCHEMAS.values():
            library.define(schema)
        _KEPT.append(library)
        module = types.ModuleType("torch_npu")
        module.npu = types.SimpleNamespace()
        for name in SCHEMAS:
            setattr(module, name, getattr(torch.ops.npu, name))
    bind(IMPLEMENTATIONS | ascend_exchange_operators.IMPLEMENTATIONS | ascend_attention_operators.IMPLEMENTATIONS)
    # torch_npu's own sets an option of CANN
    module.npu.config = types.SimpleNamespace(allow_internal_format=False)
    return module


def bind(implementations: dict[str, Any]) -> None:
    """Put CPU implementations under the operators."""
    library = torch.library.Library("npu", "IMPL", "CPU")
    for name, function in implementations.items():
        library.impl(name, function)
    _KEPT.append(library)


@contextmanager
def registered() -> Iterator[None]:
    """The stand-in as backend "ascend", until the end of the block."""
    with own_registry() as register:
        register("ascend", TARGET)
        yield
