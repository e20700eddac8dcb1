"""CUDA C++ kernels on the host, launched by the same host code as on a GPU: see warp_emulator/warps.h."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ttnn_moe.cuda.native import launch
from ttnn_moe.jit import load
from ttnn_moe.jit.spec import Spec
from ttnn_moe.sources import kernel_path

GXX = shutil.which("g++")
HERE = Path(__file__).parent / "warp_emulator"


class HostKernels:
    """Kernels built for the host, once for each set of definitions; stands in for launching.

    Args:
        where: a folder for what is built. late: whether copies land as late as they may. sources: another source for
            some kernels.

    Attributes:
        sound: no thread did what no thread may.
    """

    def __init__(self, where: Path, late: bool = False, sources: dict[str, Path] | None = None):
        self.where, self.late, self.sources, self.sound = where, late, sources or {}, True
        self._built: dict[tuple[object, ...], ctypes.CDLL] = {}

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(launch, "Launch", self._bind)
        monkeypatch.setattr(load, "stream", lambda device: None)
        monkeypatch.setattr(load, "resident_blocks", lambda *_: 3)
        monkeypatch.setattr(load, "multiprocessors", lambda device: 4)
        launch._launches.cache_clear()

    def _bind(
        self, spec: Spec, device: int, grid: tuple[int, ...], block: int, *last: Any, shared_memory: int = 0,
        cluster: int = 1, overlap: bool = False,
    ):  # fmt: skip
        """In place of load.Launch."""

        def run(stream: None, *addresses: int) -> None:
            values = [*map(ctypes.c_void_p, addresses), *last]
            places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
            x, y = (*grid, 1)[:2]
            self.sound &= bool(
                self._library(spec).run(places, x, y, block, cluster, shared_memory, int(self.late))
            )  # fmt: skip

        return run

    def _library(self, spec: Spec) -> ctypes.CDLL:
        key = spec.name, spec.defines
        if key not in self._built:
            path = self.where / f"{len(self._built)}.so"
            source = self.sources.get(spec.name, Path(f"{spec.name}.cu"))
            command = [
                str(GXX), "-O1", "-std=c++20", "-fPIC", "-shared", "-Wall", "-Werror", "-Wno-unknown-pragmas",
                *(f"-D{name}={value}" for name, value in spec.defines), f'-DKERNEL="{source}"', f"-DENTRY={spec.entry}",
                "-I", str(HERE), "-I", str(kernel_path("gpu_kernels", "cuda")), str(HERE / "launch.cpp"),
                "-o", str(path),
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            self._built[key] = ctypes.CDLL(str(path))
        return self._built[key]
