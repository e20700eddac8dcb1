"""Kernels on a GPU, and their launches, through cuda.core."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from ...errors import BackendUnavailable
from ..device import gpu
from .build import code_of, compiler, cuda_core
from .spec import Spec

HALF = 50
"""A carveout, for kernels of little shared memory between others. See docs/notes/cuda.md."""


def pointer(tensor: Tensor | None) -> int:
    """The address of a tensor's data; 0 without a tensor."""
    return 0 if tensor is None else tensor.data_ptr()


@cache  # cuda.core unloads code that nobody holds, and a captured graph holds none
def kernel(spec: Spec, device: int, shared_memory: int = 0, carveout: int | None = None) -> Any:
    """The loaded kernel of a spec on one GPU (cuda.core's Kernel).

    Args:
        shared_memory: bytes of dynamic memory that a block may have.
        carveout: per cent of the most shared memory of a multiprocessor, at the expense of L1, that the driver is asked
            for; a block that needs more gets more. None: the driver chooses.

    Raises:
        BackendUnavailable: the driver refuses the code, as one of an older CUDA does, or one of both arguments; or as
            build.code_of. CompileError, SourceMissing: as build.code_of.
    """
    core, code = cuda_core(), code_of(spec)
    with torch.cuda.device(device):
        core.Device(device).set_current()
        make = core.ObjectCode.from_ptx if spec.format == "ptx" else core.ObjectCode.from_cubin
        try:
            loaded = make(code, name=str(spec)).get_kernel(spec.entry)
        except Exception as error:  # cuda.core's own kind, or what a symbol raises that an old driver lacks
            got = f"{' '.join(str(error).split())} (code of {compiler()})"
            raise _refused(f"{spec} on GPU {device}", got) from error
        if shared_memory > 40 << 10:  # the usual limit is 48 KiB, with the kernel's own static memory
            _set(loaded, spec, device, "MAX_DYNAMIC_SHARED_SIZE_BYTES", shared_memory)
        if carveout is not None:
            _set(loaded, spec, device, "PREFERRED_SHARED_MEMORY_CARVEOUT", carveout)
    return loaded


def _set(loaded: Any, spec: Spec, device: int, name: str, value: int) -> None:
    from cuda.bindings import driver

    attribute = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
    result = driver.cuKernelSetAttribute(attribute, value, loaded.handle, device)
    _check(result, f"{name}={value} of {spec} on GPU {device}")


@lru_cache(maxsize=4096)
def config(grid: tuple[int, ...], block: int, shared_memory: int = 0, cluster: int = 1, overlap: bool = False) -> Any:
    """A launch configuration (cuda.core's LaunchConfig).

    Args:
        grid: blocks; a multiple of cluster in x.
        overlap: programmatic dependent launch: the kernel may start before its predecessor on the stream has ended.
    """
    options: dict[str, Any] = {"grid": grid, "block": block, "shmem_size": shared_memory}
    if cluster > 1:
        options |= {"grid": (grid[0] // cluster, *grid[1:]), "cluster": cluster}
    if overlap:
        options["programmatic_stream_serialization"] = True
    return cuda_core().LaunchConfig(**options)


class _TorchStream:
    def __init__(self, handle: int):
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


@lru_cache(maxsize=64)
def _stream(device: int, handle: int) -> Any:
    found = cuda_core().Device(device)
    found.set_current()
    return found.create_stream(_TorchStream(handle))


def stream(device: int) -> Any:
    """torch's current stream of a GPU, for cuda.core."""
    # as Triton does: torch.cuda.current_stream makes an object first, which takes longer than all the rest
    return _stream(device, torch._C._cuda_getCurrentRawStream(device))


class Launch:
    """A kernel with all that does not change from call to call; called with a stream and the arguments that do.

    Args:
        spec, device, shared_memory, carveout, cluster, overlap: see kernel and config.
        grid, block: blocks, threads of each.
        last: ctypes scalars that follow the call's own arguments: addresses as int, tensor maps.
    """

    def __init__(
        self,
        spec: Spec,
        device: int,
        grid: tuple[int, ...],
        block: int,
        *last: Any,
        shared_memory: int = 0,
        carveout: int | None = None,
        cluster: int = 1,
        overlap: bool = False,
    ):
        self._launch, self._last = cuda_core().launch, last
        self._config = config(grid, block, shared_memory, cluster, overlap)
        self._kernel = kernel(spec, device, shared_memory, carveout)

    def __call__(self, stream: Any, *arguments: Any) -> None:
        self._launch(stream, self._config, self._kernel, *arguments, *self._last)


@lru_cache(maxsize=1024)
def resident_blocks(spec: Spec, device: int, threads: int, shared_memory: int) -> int:
    """Blocks of a kernel that one GPU runs at one time."""
    loaded = kernel(spec, device, shared_memory)
    with torch.cuda.device(device):  # the driver asks the current one
        one = loaded.occupancy.max_active_blocks_per_multiprocessor(threads, shared_memory)
    return int(one) * gpu(device).multiprocessors


def _check(result: tuple[Any, ...], what: str = "a call") -> None:
    """what: that the driver was asked for."""
    if int(result[0]):
        raise _refused(what, result[0].name)


def _refused(what: str, got: str) -> BackendUnavailable:
    return BackendUnavailable(
        f"the CUDA driver refused {what}",
        got=got,
        remedy="update the NVIDIA driver; if that does not help, report what `ttnn-moe doctor` says",
    )
