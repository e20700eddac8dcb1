"""ttnn's descriptors as plain values: what the Python launch path makes of a plan, in the form of
tests/support/ttnn_stand_in/bindings.cpp."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any, NamedTuple

# tt-metal's numbers of the formats
bfloat16, float32, bfloat8_b, bfloat4_b, uint32 = 5, 0, 6, 7, 24
MathFidelity = SimpleNamespace(LoFi=0, HiFi2=2, HiFi3=3, HiFi4=4)
UnpackToDestMode = SimpleNamespace(Default=False, UnpackToDestFp32=True)


class CoreCoord(NamedTuple):
    x: int
    y: int


def CoreRange(start: CoreCoord, end: CoreCoord) -> tuple[int, ...]:
    return (*start, *end)


CoreRangeSet = list


def RuntimeArgs() -> dict[int, dict[int, list[int]]]:
    return defaultdict(dict)


class TensorAccessorArgs:
    def __init__(self, tensor: Any):
        self._args = list(tensor.accessor)

    def get_compile_time_args(self) -> list[int]:
        return self._args


def ReaderConfigDescriptor() -> str:
    return "reader"


def WriterConfigDescriptor() -> str:
    return "writer"


class ComputeConfigDescriptor:
    def __init__(self, **settings: Any):
        self.settings = settings
        self.unpack_to_dest_mode: list[bool] = []


def KernelDescriptor(
    kernel_source: str,
    core_ranges: list[Any],
    compile_time_args: list[int],
    named_compile_time_args: list[Any],
    defines: list[Any],
    runtime_args: dict[int, dict[int, list[int]]],
    common_runtime_args: list[int],
    config: Any,
    compiler_include_paths: list[str],
) -> dict[str, Any]:
    if isinstance(config, ComputeConfigDescriptor):
        config = {**config.settings, "unpack_to_dest_fp32": config.unpack_to_dest_mode}
    return {
        "source": kernel_source,
        "cores": core_ranges,
        "compile_args": compile_time_args,
        "named": dict(named_compile_time_args),
        "defines": dict(defines),
        "args": {(x, y): own for x, column in runtime_args.items() for y, own in column.items()},
        "common_args": common_runtime_args,
        "config": config,
        "include": [str(path) for path in compiler_include_paths],
    }


def SemaphoreDescriptor(id: int, core_ranges: list[Any], initial_value: int) -> tuple[Any, ...]:
    return (id, core_ranges, initial_value)


def CBFormatDescriptor(buffer_index: int, data_format: int, page_size: int) -> tuple[int, ...]:
    return (buffer_index, data_format, page_size)


def CBDescriptor(total_size: int, core_ranges: list[Any], format_descriptors: list[Any]) -> tuple[Any, ...]:
    return (total_size, core_ranges, format_descriptors)


def ProgramDescriptor(kernels: list[Any], semaphores: list[Any], cbs: list[Any]) -> dict[str, Any]:
    return {"kernels": kernels, "semaphores": semaphores, "cbs": cbs}
