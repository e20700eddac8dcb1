"""ttnn's host side without a device: descriptors, generic_op and its program cache, tensors that have addresses only.

A launch does what ttnn 0.81.1 does with a descriptor, up to the enqueueing: a miss makes a program, a hit copies the
runtime arguments that the descriptor has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ttnn_descriptors import (  # noqa: F401
    CBDescriptor,
    CBFormatDescriptor,
    ComputeConfigDescriptor,
    CoreCoord,
    CoreRange,
    CoreRangeSet,
    MathFidelity,
    ReaderConfigDescriptor,
    RuntimeArgs,
    UnpackToDestMode,
    WriterConfigDescriptor,
    bfloat8_b,
    bfloat16,
    float32,
    uint32,
)

int32 = 8
TILE_LAYOUT, ROW_MAJOR_LAYOUT, DRAM_MEMORY_CONFIG = "TILE", "ROW_MAJOR", "DRAM"
SEMAPHORES = 16


class StorageType:
    DEVICE, HOST = "DEVICE", "HOST"


class Grid(NamedTuple):
    x: int
    y: int


class Device:
    """Attributes:
    programs: the program cache. launched: of each launch, what every kernel gets: (common, per core).
    """

    def __init__(self, arch: str = "blackhole", grid: tuple[int, int] = (13, 10)):
        self._arch, self._grid = arch, Grid(*grid)
        self.programs: dict[int, list[tuple[list[int], dict[Any, list[int]]]]] = {}
        self.launched: list[list[tuple[list[int], dict[Any, list[int]]]]] = []
        self.next_address = 1 << 20

    def arch(self) -> str:
        return f"Arch.{self._arch.upper()}"

    def compute_with_storage_grid_size(self) -> Grid:
        return self._grid

    def dram_grid_size(self) -> Grid:
        return Grid(8 if self._arch == "blackhole" else 12, 1)

    def get_num_devices(self) -> int:
        return 1

    def worker_core_from_logical_core(self, core: CoreCoord) -> CoreCoord:
        return CoreCoord(1001 + core.x, 2002 + core.y)

    def num_program_cache_entries(self) -> int:
        return len(self.programs)

    def clear_program_cache(self) -> None:
        self.programs.clear()


class Tensor:
    def __init__(self, shape: Sequence[int], dtype: int, layout: str, device: Device | None, memory_config: str):
        self.shape, self.dtype, self.layout = tuple(shape), dtype, layout
        self._device, self._memory = device, memory_config
        self.spec = (self.shape, dtype, layout, memory_config)
        if device is not None:
            self._address = device.next_address
            device.next_address += 4096

    def buffer_address(self) -> int:
        return self._address

    def logical_volume(self) -> int:
        volume = 1
        for size in self.shape:
            volume *= size
        return volume

    def device(self) -> Device | None:
        return self._device

    def storage_type(self) -> str:
        return StorageType.HOST if self._device is None else StorageType.DEVICE

    def memory_config(self) -> str:
        return self._memory


def empty(
    shape: Sequence[int], *, dtype: int, layout: str, device: Device, memory_config: str = DRAM_MEMORY_CONFIG
) -> Tensor:
    return Tensor(shape, dtype, layout, device, memory_config)


class TensorAccessorArgs:
    """Interleaved in DRAM, and the bytes of a page."""

    def __init__(self, tensor: Tensor):
        page = 2048 if tensor.layout == TILE_LAYOUT else tensor.shape[-1] * 4
        self._args = [2, page]

    def get_compile_time_args(self) -> list[int]:
        return self._args


class SemaphoreDescriptor(NamedTuple):
    id: int
    core_ranges: Any
    initial_value: int


class KernelDescriptor:
    def __init__(
        self, *, runtime_args: dict[int, dict[int, list[int]]], common_runtime_args: list[int], **compiled: Any
    ):
        self.__dict__.update(compiled)  # every one can be set, as in ttnn
        self._compiled, self.common_runtime_args = tuple(compiled), list(common_runtime_args)
        self.runtime_args = {(x, y): own for x, column in runtime_args.items() for y, own in column.items()}

    def compiled(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._compiled}

    def clear_runtime_args(self) -> None:
        self.runtime_args = {}


class ProgramDescriptor:
    def __init__(self, kernels: list[KernelDescriptor], semaphores: list[SemaphoreDescriptor], cbs: list[Any]):
        self.kernels, self.semaphores, self.cbs = kernels, semaphores, cbs
        self.custom_program_hash: int | None = None


def compute_program_descriptor_hash(descriptor: ProgramDescriptor) -> int:
    """Of everything but runtime arguments."""
    if descriptor.custom_program_hash is not None:
        return descriptor.custom_program_hash
    compiled = [
        {name: getattr(value, "settings", value) for name, value in kernel.compiled().items()}
        for kernel in descriptor.kernels
    ]
    return hash(repr((compiled, descriptor.semaphores, descriptor.cbs)))


def generic_op(tensors: list[Tensor], descriptor: ProgramDescriptor) -> Tensor:
    device = tensors[0].device()
    assert device is not None and len(tensors) >= 2
    key = compute_program_descriptor_hash(descriptor)
    found = device.programs.get(key)
    if found is None:
        for semaphore in descriptor.semaphores:
            if semaphore.id >= SEMAPHORES:
                raise RuntimeError(f"TT_FATAL: Semaphore id {semaphore.id} exceeds max value {SEMAPHORES - 1}")
        found = [(list(kernel.common_runtime_args), dict(kernel.runtime_args)) for kernel in descriptor.kernels]
        device.programs[key] = found
    else:
        for (common, own), kernel in zip(found, descriptor.kernels, strict=True):
            common[:] = kernel.common_runtime_args
            own.update(kernel.runtime_args)
    device.launched.append([(list(common), dict(own)) for common, own in found])
    return tensors[-1]
